#include "node_table.hpp"

#include <algorithm>

#include "stepgraph/cuda/check.hpp"

namespace stepgraph::cuda {
namespace {

/// Whether there are edges to the node and all of them let it start early.
bool starts_early(cudaGraphNode_t node) {
  std::size_t count = 0;
  STEPGRAPH_CUDA_CHECK(cudaGraphNodeGetDependencies(node, nullptr, nullptr, &count));
  if (count == 0) return false;
  std::vector<cudaGraphNode_t> dependencies(count);
  std::vector<cudaGraphEdgeData> edges(count);
  STEPGRAPH_CUDA_CHECK(
      cudaGraphNodeGetDependencies(node, dependencies.data(), edges.data(), &count));
  return std::all_of(edges.begin(), edges.end(), [](const cudaGraphEdgeData& edge) {
    return edge.type == cudaGraphDependencyTypeProgrammatic;
  });
}

}  // namespace

graph_node_info describe_kernel(const plan_node& planned, cudaGraphNode_t node) {
  cudaKernelNodeParams parameters = {};
  STEPGRAPH_CUDA_CHECK(cudaGraphKernelNodeGetParams(node, &parameters));
  const char* function = nullptr;
  STEPGRAPH_CUDA_CHECK(cudaFuncGetName(&function, parameters.func));
  graph_node_info info;
  info.name = planned.name;
  info.kind = planned.kind;
  info.function = function;
  info.blocks = parameters.gridDim.x;
  info.threads = parameters.blockDim.x;
  info.programmatic = starts_early(node);
  info.graph_nodes = 1;
  return info;
}

graph_node_info describe_foreign(const plan_node& planned, std::size_t captured) {
  graph_node_info info;
  info.name = planned.name;
  info.kind = planned.kind;
  info.only_if_applied = planned.only_if_applied;
  info.graph_nodes = static_cast<std::uint32_t>(captured);
  return info;
}

}  // namespace stepgraph::cuda
