#pragma once

#include "common/cuda_testing.hpp"
#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::test {

/// An executable of what was captured; the graph itself may go.
inline cuda::unique_graph_exec instantiate(const cuda::unique_graph& graph) {
  cudaGraphExec_t handle = nullptr;
  check(cudaGraphInstantiate(&handle, graph.get(), 0));
  return cuda::unique_graph_exec(handle);
}

}  // namespace stepgraph::test
