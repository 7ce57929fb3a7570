#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>

#include "bench_cases.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::cli {
namespace {

/// More would fill the queue of the driver, and a launch would wait for the device.
constexpr int launches_in_flight = 32;

cuda::unique_event make_timing_event() {
  cudaEvent_t event = nullptr;
  STEPGRAPH_CUDA_CHECK(cudaEventCreate(&event));
  return cuda::unique_event(event);
}

class cuda_machine final : public bench_machine {
 public:
  cuda_machine(int device, cudaDeviceProp properties) : device_(device), properties_(properties) {}

  std::string executor() const override { return "graph"; }
  std::string device() const override { return properties_.name; }

  std::uint64_t memory_bytes() const override {
    std::size_t free = 0;
    std::size_t total = 0;
    STEPGRAPH_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free / 2;
  }

  double copy_gb_s(std::uint64_t bytes, int repetitions) override {
    const cuda::unique_device_memory from = filled(bytes);
    const cuda::unique_device_memory to = filled(bytes);
    double best = 0.0;
    for (int i = 0; i <= repetitions; ++i) {
      const double us = device_us(1, [&] {
        STEPGRAPH_CUDA_CHECK(
            cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, stream_.get()));
      });
      best = std::max(best, 2.0 * static_cast<double>(bytes) / us * 1e-3);
    }
    return best;
  }

  bench_times run(const bench_case& measured, int repetitions) override {
    std::vector<cuda::unique_device_memory> blocks;
    const operand_allocator allocate = [&](std::uint64_t bytes) {
      blocks.push_back(filled(bytes));
      return blocks.back().get();
    };
    graph_executor step(plan_of(measured, {.kind = device_kind::cuda, .index = device_}, allocate),
                        stream_.get());
    const auto launch = [&] { step.launch(stream_.get()); };
    for (int i = 0; i < 3; ++i) launch();
    const int steps = steps_worth_measuring(device_us(1, launch));
    std::vector<double> step_us;
    std::vector<double> launch_us;
    for (int i = 0; i < repetitions; ++i) {
      step_us.push_back(device_us(steps, launch));
      for (int n = 0; n < launches_in_flight; ++n) {
        const auto start = std::chrono::steady_clock::now();
        launch();
        const std::chrono::duration<double, std::micro> call =
            std::chrono::steady_clock::now() - start;
        launch_us.push_back(call.count());
      }
      STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream_.get()));
    }
    return {.bytes = step.plan().bytes_read() + step.plan().bytes_written(),
            .step_us = median_of(std::move(step_us)),
            .launch_us = median_of(std::move(launch_us))};
  }

 private:
  /// Every format reads these bytes as a number near 0.01 or 1.
  cuda::unique_device_memory filled(std::uint64_t bytes) {
    cuda::unique_device_memory memory = cuda::allocate_device(bytes);
    STEPGRAPH_CUDA_CHECK(cudaMemsetAsync(memory.get(), 0x3c, bytes, stream_.get()));
    return memory;
  }

  /// Of one of `runs` calls back to back, between two events.
  template <class Enqueue>
  double device_us(int runs, Enqueue&& enqueue) {
    STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream_.get()));
    STEPGRAPH_CUDA_CHECK(cudaEventRecord(begin_.get(), stream_.get()));
    for (int run = 0; run < runs; ++run) enqueue();
    STEPGRAPH_CUDA_CHECK(cudaEventRecord(end_.get(), stream_.get()));
    STEPGRAPH_CUDA_CHECK(cudaEventSynchronize(end_.get()));
    float milliseconds = 0.0f;
    STEPGRAPH_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()));
    return 1e3 * static_cast<double>(milliseconds) / runs;
  }

  int device_;
  cudaDeviceProp properties_;
  cuda::unique_stream stream_ = cuda::make_stream();
  cuda::unique_event begin_ = make_timing_event();
  cuda::unique_event end_ = make_timing_event();
};

}  // namespace

std::unique_ptr<bench_machine> make_cuda_machine(std::string& why_not) {
  // Without a driver the device count fails with a message about its version.
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    static_cast<void>(cudaGetLastError());
    why_not = "no NVIDIA driver";
    return nullptr;
  }
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) {
    static_cast<void>(cudaGetLastError());
    why_not = status == cudaSuccess ? "no CUDA device" : cudaGetErrorString(status);
    return nullptr;
  }
  int device = 0;
  cudaDeviceProp properties{};
  STEPGRAPH_CUDA_CHECK(cudaGetDevice(&device));
  STEPGRAPH_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return std::make_unique<cuda_machine>(device, properties);
}

}  // namespace stepgraph::cli
