#pragma once

#include <algorithm>
#include <vector>

#include "stepgraph/cuda/check.hpp"
#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::perf {

/// Times what a call enqueues onto a stream, by events around it.
class device_timer {
 public:
  explicit device_timer(cudaStream_t stream) : stream_(stream) {
    cudaEvent_t handle = nullptr;
    STEPGRAPH_CUDA_CHECK(cudaEventCreate(&handle));
    begin_ = cuda::unique_event(handle);
    STEPGRAPH_CUDA_CHECK(cudaEventCreate(&handle));
    end_ = cuda::unique_event(handle);
  }

  /// Seconds of device time; waits for the device.
  template <class Enqueue>
  double seconds(Enqueue&& enqueue) {
    STEPGRAPH_CUDA_CHECK(cudaEventRecord(begin_.get(), stream_));
    enqueue();
    STEPGRAPH_CUDA_CHECK(cudaEventRecord(end_.get(), stream_));
    STEPGRAPH_CUDA_CHECK(cudaEventSynchronize(end_.get()));
    float milliseconds = 0.0f;
    STEPGRAPH_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()));
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaStream_t stream_;
  cuda::unique_event begin_, end_;
};

/// The middle value; `values` must not be empty.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace stepgraph::perf
