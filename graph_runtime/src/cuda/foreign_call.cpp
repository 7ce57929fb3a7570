#include "foreign_call.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "capture_state.hpp"
#include "stepgraph/error.hpp"
#include "trace.hpp"

namespace stepgraph::cuda {
namespace {

/// The capture as foreign work left it; refuses another capture than the one before.
capture_state check_capture(const plan_node& node, cudaStream_t stream,
                            const capture_state& before) {
  capture_state after = read_capture(stream);
  if (after.status == cudaStreamCaptureStatusActive && after.id == before.id) return after;
  // The refused call left its error, unless the callback looked at it.
  const cudaError_t status = cudaGetLastError();
  const std::string cause =
      status == cudaSuccess
          ? std::string()
          : fmt::format(": {} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
  throw capture_error(fmt::format(
      "foreign work '{}': {}{}", node.name,
      after.status == cudaStreamCaptureStatusInvalidated
          ? "a call that is not allowed while its stream is captured invalidated the capture"
          : "ended the capture of its stream",
      cause));
}

bool has_dependents(cudaGraphNode_t node) {
  std::size_t count = 0;
  // The number alone; a refusal to name edges that carry data says that there are some.
  if (cudaGraphNodeGetDependentNodes(node, nullptr, nullptr, &count) == cudaSuccess) {
    return count != 0;
  }
  static_cast<void>(cudaGetLastError());
  return true;
}

}  // namespace

void call_foreign_work(const plan_node& node, const foreign_callback& work,
                       const foreign_context& context) {
  const trace_range range(node.name.c_str());
  const capture_state before = read_capture(context.stream);
  work(context);
  if (before.status != cudaStreamCaptureStatusNone) check_capture(node, context.stream, before);
}

captured_foreign_work capture_foreign_work(const plan_node& node, const foreign_callback& work,
                                           const foreign_context& context) {
  const trace_range range(node.name.c_str());
  const capture_state before = read_capture(context.stream);
  const std::vector<cudaGraphNode_t> nodes_before = sorted_nodes(before.graph);
  work(context);
  const capture_state after = check_capture(node, context.stream, before);
  const std::vector<cudaGraphNode_t> nodes_after = sorted_nodes(after.graph);
  captured_foreign_work captured;
  std::set_difference(nodes_after.begin(), nodes_after.end(), nodes_before.begin(),
                      nodes_before.end(), std::back_inserter(captured.nodes), std::less<>());
  captured.forked =
      std::any_of(captured.nodes.begin(), captured.nodes.end(), [&](cudaGraphNode_t each) {
        const bool awaited = std::find(after.dependencies.begin(), after.dependencies.end(),
                                       each) != after.dependencies.end();
        return !awaited && !has_dependents(each);
      });
  return captured;
}

}  // namespace stepgraph::cuda
