#include "conditional.hpp"

#include <fmt/format.h>

#include "capture_state.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph {

bool conditional_nodes_supported() {
  // The runtime that this was compiled with has them; the driver may be older.
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return driver >= 12040;
}

namespace cuda {
namespace {

void check_capture_call(cudaError_t status, const char* call, const std::string& what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw capture_error(fmt::format("{}: {} failed: {} ({})", what, call, cudaGetErrorString(status),
                                  cudaGetErrorName(status)));
}

/// What a conditional body cannot hold; null for what it can.
const char* why_not_in_a_body(cudaGraphNodeType type) {
  switch (type) {
    case cudaGraphNodeTypeKernel:
    case cudaGraphNodeTypeMemcpy:
    case cudaGraphNodeTypeMemset:
    case cudaGraphNodeTypeGraph:
    case cudaGraphNodeTypeEmpty:
    case cudaGraphNodeTypeConditional:
      return nullptr;
    case cudaGraphNodeTypeHost:
      return "a host function";
    case cudaGraphNodeTypeWaitEvent:
      return "a wait for an event";
    case cudaGraphNodeTypeEventRecord:
      return "the record of an event";
    case cudaGraphNodeTypeMemAlloc:
      return "an allocation";
    case cudaGraphNodeTypeMemFree:
      return "the release of an allocation";
    default:
      return "a node of another kind";
  }
}

}  // namespace

void check_conditional_nodes(const std::string& what) {
  if (conditional_nodes_supported()) return;
  throw usage_error(
      fmt::format("{}: needs conditional graph nodes, which this driver does not have; expected a "
                  "driver for CUDA 12.4 or newer",
                  what));
}

cudaGraphConditionalHandle make_condition(cudaStream_t stream, const std::string& what) {
  cudaGraphConditionalHandle condition = 0;
  check_capture_call(cudaGraphConditionalHandleCreate(&condition, read_capture(stream).graph, 0, 0),
                     "cudaGraphConditionalHandleCreate", what);
  return condition;
}

conditional_node add_conditional_node(cudaStream_t stream, cudaGraphConditionalHandle condition,
                                      cudaGraphConditionalNodeType type, const std::string& what) {
  const capture_state capture = read_capture(stream);
  cudaGraphNodeParams parameters = {};
  parameters.type = cudaGraphNodeTypeConditional;
  parameters.conditional.handle = condition;
  parameters.conditional.type = type;
  parameters.conditional.size = 1;
  conditional_node added;
  check_capture_call(
      cudaGraphAddNode(&added.node, capture.graph, capture.dependencies.data(),
                       capture.edges.data(), capture.dependencies.size(), &parameters),
      "cudaGraphAddNode", what);
  added.body = parameters.conditional.phGraph_out[0];
  check_capture_call(cudaStreamUpdateCaptureDependencies(stream, &added.node, nullptr, 1,
                                                         cudaStreamSetCaptureDependencies),
                     "cudaStreamUpdateCaptureDependencies", what);
  return added;
}

void add_child_graph(cudaStream_t stream, cudaGraph_t child, const std::string& what) {
  const capture_state capture = read_capture(stream);
  cudaGraphNode_t added = nullptr;
  check_capture_call(
      cudaGraphAddChildGraphNode(&added, capture.graph, capture.dependencies.data(),
                                 capture.dependencies.size(), child),
      "cudaGraphAddChildGraphNode", what);
  check_capture_call(cudaStreamUpdateCaptureDependencies(stream, &added, nullptr, 1,
                                                         cudaStreamSetCaptureDependencies),
                     "cudaStreamUpdateCaptureDependencies", what);
}

void fill_body(cudaGraph_t body, cudaGraph_t child) {
  cudaGraphNode_t added = nullptr;
  if (child != nullptr) {
    STEPGRAPH_CUDA_CHECK(cudaGraphAddChildGraphNode(&added, body, nullptr, 0, child));
  } else {
    // A body without any node is nowhere said to be legal.
    STEPGRAPH_CUDA_CHECK(cudaGraphAddEmptyNode(&added, body, nullptr, 0));
  }
}

void check_body_nodes(const std::vector<cudaGraphNode_t>& nodes, const std::string& what) {
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    STEPGRAPH_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    if (const char* const forbidden = why_not_in_a_body(type)) {
      throw capture_error(
          fmt::format("{}: captured {}, expected kernels, copies, memsets, child graphs and "
                      "conditional nodes alone in the body of a conditional node",
                      what, forbidden));
    }
  }
}

body_capture::body_capture(cudaStream_t stream, cudaGraph_t body, std::string what)
    : stream_(stream), what_(std::move(what)) {
  check_capture_call(cudaStreamBeginCaptureToGraph(stream, body, nullptr, nullptr, 0,
                                                   cudaStreamCaptureModeThreadLocal),
                     "cudaStreamBeginCaptureToGraph", what_);
}

body_capture::~body_capture() {
  if (!open_) return;
  cudaGraph_t body = nullptr;
  static_cast<void>(cudaStreamEndCapture(stream_, &body));
  static_cast<void>(cudaGetLastError());
}

void body_capture::finish() {
  open_ = false;
  cudaGraph_t body = nullptr;
  check_capture_call(cudaStreamEndCapture(stream_, &body), "cudaStreamEndCapture", what_);
}

}  // namespace cuda
}  // namespace stepgraph
