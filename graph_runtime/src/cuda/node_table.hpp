#pragma once

#include <cuda_runtime_api.h>

#include "stepgraph/cuda/graph_executor.hpp"

namespace stepgraph::cuda {

/// A node of the step's own, read back from the graph into which it was captured. Throws
/// cuda_error.
graph_node_info describe_kernel(const plan_node& planned, cudaGraphNode_t node);

/// Foreign work that became `captured` graph nodes.
graph_node_info describe_foreign(const plan_node& planned, std::size_t captured);

}  // namespace stepgraph::cuda
