#include "common/cuda_executor_adapter.hpp"

#include "common/cuda_testing.hpp"
#include "common/instantiate.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"

namespace stepgraph::test {
namespace {

/// Memory of the current device and a stream on which everything happens.
class cuda_adapter : public executor_adapter {
 protected:
  explicit cuda_adapter(const test_problem& problem) : executor_adapter(problem) {
    check(cudaGetDevice(&device_));
  }

  device_location device() const { return {device_kind::cuda, device_}; }
  cudaStream_t stream() const { return stream_.get(); }

  std::byte* allocate(std::size_t bytes) override {
    memory_.emplace_back(bytes);
    return memory_.back().data();
  }
  void copy_in(std::byte* target, std::span<const std::byte> bytes, bool wait) override {
    if (bytes.empty()) return;
    // Fresh memory that no launch knows needs no order.
    const cudaStream_t order = wait ? stream() : copies_.get();
    check(cudaMemcpyAsync(target, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, order));
    check(cudaStreamSynchronize(order));
  }
  void copy_out(std::span<std::byte> target, const std::byte* source) const override {
    if (target.empty()) return;
    check(cudaMemcpyAsync(target.data(), source, target.size(), cudaMemcpyDeviceToHost, stream()));
    check(cudaStreamSynchronize(stream()));
  }

 private:
  int device_ = 0;
  cuda_stream stream_;
  cuda_stream copies_;
  std::vector<device_buffer<std::byte>> memory_;
};

class stream_eager_adapter final : public cuda_adapter {
 public:
  explicit stream_eager_adapter(const test_problem& problem)
      : cuda_adapter(problem), executor_(place(device()), stream()) {}

  executor& get() override { return executor_; }
  void launch() override { executor_.launch(stream()); }

 protected:
  update_report update_executor(step_plan plan) override {
    return executor_.update(std::move(plan), stream());
  }

 private:
  stream_executor executor_;
};

class stream_captured_adapter final : public cuda_adapter {
 public:
  explicit stream_captured_adapter(const test_problem& problem)
      : cuda_adapter(problem), executor_(place(device()), stream()) {
    capture();
  }

  executor& get() override { return executor_; }
  void launch() override {
    executor_.deliver_async(stream());
    check(cudaGraphLaunch(replayed_.get(), stream()));
  }

 protected:
  update_report update_executor(step_plan plan) override {
    update_report report = executor_.update(std::move(plan), stream());
    EXPECT_EQ(executor_.recapture_required().has_value(), report.rebuilt);
    if (report.rebuilt) capture();
    EXPECT_EQ(executor_.recapture_required(), std::nullopt);
    return report;
  }

 private:
  void capture() {
    cuda::capture_scope capture(stream());
    executor_.launch(stream());
    replayed_ = instantiate(capture.finish());
  }

  stream_executor executor_;
  cuda::unique_graph_exec replayed_;
};

class graph_adapter final : public cuda_adapter {
 public:
  explicit graph_adapter(const test_problem& problem)
      : cuda_adapter(problem), executor_(place(device()), stream()) {}

  executor& get() override { return executor_; }
  void launch() override { executor_.launch(stream()); }

 protected:
  update_report update_executor(step_plan plan) override {
    return executor_.update(std::move(plan), update_path::instantiate, stream());
  }

 private:
  graph_executor executor_;
};

}  // namespace

std::string missing_gpu() {
  std::string reason;
  return device_count(&reason) == 0 ? "needs a GPU: " + reason : std::string();
}

std::unique_ptr<executor_adapter> make_cuda_adapter(executor_kind kind,
                                                    const test_problem& problem) {
  switch (kind) {
    case executor_kind::stream_eager:
      return std::make_unique<stream_eager_adapter>(problem);
    case executor_kind::stream_captured:
      return std::make_unique<stream_captured_adapter>(problem);
    case executor_kind::graph:
      return std::make_unique<graph_adapter>(problem);
    case executor_kind::host:
      break;
  }
  throw std::invalid_argument("not a CUDA executor");
}

}  // namespace stepgraph::test
