#include "step_timer.hpp"

#include <algorithm>
#include <cstddef>

#if defined(STEPGRAPH_TORCH_CUDA)
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace stepgraph::cli {
namespace {

double median(std::vector<double> values) {
  values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 10));
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

#if defined(STEPGRAPH_TORCH_CUDA)

struct step_timer::events {
  cudaEvent_t before = nullptr;
  cudaEvent_t after = nullptr;

  events() {
    C10_CUDA_CHECK(cudaEventCreate(&before));
    C10_CUDA_CHECK(cudaEventCreate(&after));
  }
  ~events() {
    // A destructor cannot report; the process is about to end anyway.
    C10_CUDA_IGNORE_ERROR(cudaEventDestroy(before));
    C10_CUDA_IGNORE_ERROR(cudaEventDestroy(after));
  }
  events(const events&) = delete;
  events& operator=(const events&) = delete;

  void start() const {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    stream.synchronize();
    C10_CUDA_CHECK(cudaEventRecord(before, stream.stream()));
  }

  double stop() const {
    C10_CUDA_CHECK(cudaEventRecord(after, c10::cuda::getCurrentCUDAStream().stream()));
    C10_CUDA_CHECK(cudaEventSynchronize(after));
    float milliseconds = 0.0f;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, before, after));
    return 1e3 * static_cast<double>(milliseconds);
  }
};

#else

struct step_timer::events {
  void start() const {}
  double stop() const { return 0.0; }
};

#endif

step_timer::step_timer(bool on_gpu) : events_(on_gpu ? std::make_unique<events>() : nullptr) {}

step_timer::~step_timer() = default;

void step_timer::start() {
  if (events_) events_->start();
  started_ = std::chrono::steady_clock::now();
}

double step_timer::stop() {
  const std::chrono::duration<double, std::micro> call =
      std::chrono::steady_clock::now() - started_;
  step_us_.push_back(events_ ? events_->stop() : call.count());
  if (events_) launch_us_.push_back(call.count());
  return step_us_.back();
}

double step_timer::median_step_us() const { return median(step_us_); }

std::optional<double> step_timer::median_launch_us() const {
  if (launch_us_.empty()) return std::nullopt;
  return median(launch_us_);
}

}  // namespace stepgraph::cli
