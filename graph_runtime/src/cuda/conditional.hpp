#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

/// Conditional graph nodes while a stream is being captured. Everywhere `what` is the beginning of
/// a message: what the node is for.
namespace stepgraph::cuda {

/// Throws usage_error if the driver has no conditional nodes.
void check_conditional_nodes(const std::string& what);

/// A condition for one conditional node of the graph that `stream` is captured into. Whoever
/// captures sets it in every launch before the node. Throws capture_error.
cudaGraphConditionalHandle make_condition(cudaStream_t stream, const std::string& what);

struct conditional_node {
  cudaGraphNode_t node = nullptr;
  cudaGraph_t body = nullptr;  ///< the node's
};

/// Puts a conditional node at the end of what `stream` has captured. Throws capture_error.
conditional_node add_conditional_node(cudaStream_t stream, cudaGraphConditionalHandle condition,
                                      cudaGraphConditionalNodeType type, const std::string& what);

/// Puts a copy of a graph at the end of what `stream` has captured. Throws capture_error.
void add_child_graph(cudaStream_t stream, cudaGraph_t child, const std::string& what);

/// Fills the empty body of a conditional node with a copy of a graph; null: with nothing. Throws
/// cuda_error.
void fill_body(cudaGraph_t body, cudaGraph_t child);

/// Throws capture_error if one of the nodes is of a kind that no body can hold.
void check_body_nodes(const std::vector<cudaGraphNode_t>& nodes, const std::string& what);

/// Captures what is enqueued onto a stream into the body of a conditional node, which stays its
/// owner. Left without `finish`, by an exception for example, it ends the capture, after which the
/// graph around it is of no use.
class body_capture {
 public:
  /// Throws capture_error.
  body_capture(cudaStream_t stream, cudaGraph_t body, std::string what);
  ~body_capture();
  body_capture(const body_capture&) = delete;
  body_capture& operator=(const body_capture&) = delete;

  /// Ends the capture. Throws capture_error if the capture was invalidated.
  void finish();

 private:
  cudaStream_t stream_;
  std::string what_;
  bool open_ = true;
};

}  // namespace stepgraph::cuda
