#include "capture_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::cuda {

capture_state read_capture(cudaStream_t stream) {
  capture_state state;
  const cudaGraphNode_t* dependencies = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  std::size_t count = 0;
  STEPGRAPH_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &state.status, &state.id, &state.graph,
                                                &dependencies, &edges, &count));
  if (state.status != cudaStreamCaptureStatusActive) return state;
  state.dependencies.assign(dependencies, dependencies + count);
  // No edges may stand for edges that all are plain.
  state.edges.resize(count);
  if (edges != nullptr) std::copy(edges, edges + count, state.edges.begin());
  return state;
}

cudaGraphNode_t latest_captured_node(cudaStream_t stream) {
  const capture_state state = read_capture(stream);
  if (state.status != cudaStreamCaptureStatusActive || state.dependencies.size() != 1) {
    throw capture_error(fmt::format("expected one captured node at the end of the stream, found {}",
                                    state.dependencies.size()));
  }
  return state.dependencies[0];
}

std::vector<cudaGraphNode_t> sorted_nodes(cudaGraph_t graph) {
  std::size_t count = 0;
  STEPGRAPH_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  if (count == 0) return nodes;
  STEPGRAPH_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  std::sort(nodes.begin(), nodes.end(), std::less<>());
  return nodes;
}

}  // namespace stepgraph::cuda
