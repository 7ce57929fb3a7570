#pragma once

#include <cuda_runtime_api.h>

#include <vector>

namespace stepgraph::cuda {

/// A stream's capture at one moment. Without a capture in progress only `status` means something.
struct capture_state {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;    ///< one of each capture
  cudaGraph_t graph = nullptr;  ///< borrowed
  /// What the next captured node will depend on, and how.
  std::vector<cudaGraphNode_t> dependencies;
  std::vector<cudaGraphEdgeData> edges;
};

/// Throws cuda_error.
capture_state read_capture(cudaStream_t stream);

/// The node that was captured last onto the stream. Throws capture_error if there is not exactly
/// one.
cudaGraphNode_t latest_captured_node(cudaStream_t stream);

/// All nodes of a graph, bodies of conditional nodes aside, ordered by handle. Throws cuda_error.
std::vector<cudaGraphNode_t> sorted_nodes(cudaGraph_t graph);

}  // namespace stepgraph::cuda
