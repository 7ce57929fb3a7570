#pragma once

#include <cstddef>

#include "common/executor_adapter.hpp"

#if defined(STEPGRAPH_HAS_CUDA)
#include "common/cuda_testing.hpp"
#endif

namespace stepgraph::test {

/// Free bytes of the memory that an executor of this kind uses; 0 for the host, whose memory others
/// share.
inline std::size_t free_memory(executor_kind kind) {
#if defined(STEPGRAPH_HAS_CUDA)
  if (kind != executor_kind::host) {
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total));
    return free;
  }
#endif
  static_cast<void>(kind);
  return 0;
}

}  // namespace stepgraph::test
