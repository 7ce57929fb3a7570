#include "pinned_pool.hpp"

#include <algorithm>

#include "stepgraph/cuda/check.hpp"

namespace stepgraph::cuda {
namespace {

constexpr std::size_t smallest_buffer = 4096;

}  // namespace

pinned_pool::buffer& pinned_pool::acquire(std::size_t bytes) {
  for (buffer& candidate : buffers_) {
    if (candidate.capacity < bytes) continue;
    if (candidate.in_flight) {
      const cudaError_t status = cudaEventQuery(candidate.read.get());
      if (status == cudaErrorNotReady) continue;
      STEPGRAPH_CUDA_CHECK(status);
      candidate.in_flight = false;
    }
    return candidate;
  }
  buffer fresh;
  fresh.capacity = std::max(bytes, smallest_buffer);
  fresh.memory = allocate_pinned(fresh.capacity);
  fresh.read = make_event();
  buffers_.push_back(std::move(fresh));
  return buffers_.back();
}

void pinned_pool::retire(buffer& used, cudaStream_t stream) {
  used.in_flight = true;
  STEPGRAPH_CUDA_CHECK(cudaEventRecord(used.read.get(), stream));
}

}  // namespace stepgraph::cuda
