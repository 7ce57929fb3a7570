#pragma once

#include <deque>

#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::cuda {

/// Page-locked buffers on their way to the device. A buffer is reused once the stream work that
/// reads it has finished; when all are in flight, another is allocated, so that nobody waits.
class pinned_pool {
 public:
  struct buffer {
    unique_pinned_memory memory;
    std::size_t capacity = 0;
    unique_event read;  ///< recorded after the work that reads the buffer
    bool in_flight = false;
  };

  /// A buffer of at least `bytes` that nothing reads. It stays the pool's; hand it to `retire` or
  /// let the next `acquire` reuse it. Throws cuda_error.
  buffer& acquire(std::size_t bytes);

  /// The work enqueued onto `stream` so far is the last to read the buffer. Throws cuda_error.
  void retire(buffer& used, cudaStream_t stream);

 private:
  std::deque<buffer> buffers_;  ///< references stay valid as it grows
};

}  // namespace stepgraph::cuda
