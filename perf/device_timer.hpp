#pragma once

#include "device_data.hpp"
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

  /// Seconds of device time of one of `runs` calls back to back; waits for the device. The device
  /// is kept busy for `head_start` seconds first: long enough for the calls to be enqueued, it
  /// keeps their processor time out of the result.
  template <class Enqueue>
  double seconds(Enqueue&& enqueue, int runs = 1, double head_start = 0.0) {
    if (head_start > 0.0) STEPGRAPH_CUDA_CHECK(cuda_launch_spin(head_start, stream_));
    STEPGRAPH_CUDA_CHECK(cudaEventRecord(begin_.get(), stream_));
    for (int run = 0; run < runs; ++run) enqueue();
    STEPGRAPH_CUDA_CHECK(cudaEventRecord(end_.get(), stream_));
    STEPGRAPH_CUDA_CHECK(cudaEventSynchronize(end_.get()));
    float milliseconds = 0.0f;
    STEPGRAPH_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()));
    return static_cast<double>(milliseconds) * 1e-3 / runs;
  }

 private:
  cudaStream_t stream_;
  cuda::unique_event begin_, end_;
};

/// A head start in which `launches` kernels or graphs are surely enqueued.
inline double head_start_for(int launches) { return 100e-6 + 10e-6 * launches; }

}  // namespace stepgraph::perf
