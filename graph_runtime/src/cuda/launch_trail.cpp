#include "launch_trail.hpp"

#include "stepgraph/cuda/check.hpp"

namespace stepgraph::cuda {

void launch_trail::follow(cudaStream_t stream) {
  if (continues(stream)) return;
  if (unrecorded()) {
    // The stream of that work need not exist any more.
    STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
    return finished();
  }
  STEPGRAPH_CUDA_CHECK(cudaStreamWaitEvent(stream, event_.get(), 0));
  stream_ = stream;  // which everything so far now comes before
}

void launch_trail::follow_by_replay(cudaStream_t stream) {
  if (end_ != end::of_a_replay) follow(stream);
}

void launch_trail::record(cudaStream_t stream) {
  if (!event_) event_ = make_event();
  STEPGRAPH_CUDA_CHECK(cudaEventRecord(event_.get(), stream));
  add(stream, end::recorded);
}

}  // namespace stepgraph::cuda
