#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "step_runner.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::libtorch::detail {
namespace {

bool is_capturing(c10::cuda::CUDAStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(stream, &status);
  if (result == cudaErrorStreamCaptureImplicit) {
    // Not sticky, but the next check of the last error would report it.
    (void)cudaGetLastError();
    throw usage_error(
        "step: the current stream is the legacy default stream while a blocking stream is being "
        "captured, expected the captured stream or a non-blocking one");
  }
  C10_CUDA_CHECK(result);
  return status != cudaStreamCaptureStatusNone;
}

/// What both kinds of launches do around the executor.
class cuda_runner : public step_runner {
 public:
  bool capturing() const final { return is_capturing(current_stream()); }

  void retire(const c10::Storage& storage) final {
    // A no-op for memory allocated on this stream and for memory of other allocators.
    if (last_stream_) {
      c10::cuda::CUDACachingAllocator::recordStream(storage.data_ptr(), *last_stream_);
    }
  }

 protected:
  explicit cuda_runner(c10::Device device) : device_(device) {}

  c10::cuda::CUDAStream current_stream() const {
    return c10::cuda::getCurrentCUDAStream(device_.index());
  }

  c10::Device device_;
  std::optional<c10::cuda::CUDAStream> last_stream_;
};

class graph_runner final : public cuda_runner {
 public:
  graph_runner(step_plan plan, c10::Device device)
      : cuda_runner(device), executor_(std::move(plan), current_stream()) {}

  executor& core() noexcept override { return executor_; }
  const float* loss_scale_address() const override { return executor_.loss_scale_address(); }

  void check_launch() override {
    if (is_capturing(current_stream())) {
      throw usage_error(
          "step: the current stream is being captured, but this optimizer replays a graph of its "
          "own; construct it with StepOptions().capturable(true) to record its step into a "
          "capture, or step after the capture has ended");
    }
  }

  bool launch(bool) override {
    const c10::cuda::CUDAGuard guard(device_);
    const c10::cuda::CUDAStream stream = current_stream();
    last_stream_ = stream;
    executor_.launch(stream);
    return true;
  }

 private:
  graph_executor executor_;
};

class stream_runner final : public cuda_runner {
 public:
  stream_runner(step_plan plan, c10::Device device)
      : cuda_runner(device), executor_(std::move(plan), current_stream()) {
    last_stream_ = current_stream();
  }

  executor& core() noexcept override { return executor_; }
  const float* loss_scale_address() const override { return executor_.loss_scale_address(); }

  bool launch(bool pending) override {
    const c10::cuda::CUDAGuard guard(device_);
    const c10::cuda::CUDAStream stream = current_stream();
    if (!is_capturing(stream)) {
      last_stream_ = stream;
      executor_.launch(stream);
      return true;
    }
    // Nothing can be replayed yet, so what eager steps left behind can still be brought up to
    // date: the addresses that exist inside the capture, above all.
    const bool deliver_now = pending && !captured_;
    if (deliver_now) executor_.deliver_beside_capture();
    executor_.launch(stream);
    captured_ = true;
    return deliver_now;
  }

  bool can_deliver() const noexcept override { return true; }

  void deliver() override {
    check_not_capturing("deliver");
    const c10::cuda::CUDAGuard guard(device_);
    const c10::cuda::CUDAStream stream = current_stream();
    last_stream_ = stream;
    executor_.deliver_async(stream);
  }

  bool captured() const noexcept override { return captured_; }
  void abandon_captures() noexcept override { captured_ = false; }

 private:
  stream_executor executor_;
  bool captured_ = false;
};

}  // namespace

bool current_stream_is_capturing(c10::Device device) {
  return is_capturing(c10::cuda::getCurrentCUDAStream(device.index()));
}

std::shared_ptr<step_runner> make_cuda_runner(step_plan plan, c10::Device device, bool capturable) {
  const c10::cuda::CUDAGuard guard(device);
  if (capturable) return std::make_shared<stream_runner>(std::move(plan), device);
  return std::make_shared<graph_runner>(std::move(plan), device);
}

namespace {

/// A stream of torch's pool that nobody captures on: the pool hands its streams out in turn, the
/// caller's too.
c10::cuda::CUDAStream stream_outside_captures(c10::Device device) {
  constexpr int more_than_the_pool_holds = 64;
  for (int i = 0; i < more_than_the_pool_holds; ++i) {
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(false, device.index());
    if (!is_capturing(stream)) return stream;
  }
  throw usage_error("step: every stream of torch's pool is being captured");
}

}  // namespace

struct outside_capture::state {
  // First, since the stream may have to be created, which the capture would refuse.
  c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
  c10::cuda::CUDAStream stream;
  c10::cuda::CUDAStreamGuard current;

  explicit state(c10::Device device) : stream(stream_outside_captures(device)), current(stream) {}
};

outside_capture::outside_capture(c10::Device device) : state_(std::make_unique<state>(device)) {}
outside_capture::~outside_capture() = default;

void outside_capture::finish() { C10_CUDA_CHECK(cudaStreamSynchronize(state_->stream)); }

}  // namespace stepgraph::libtorch::detail
