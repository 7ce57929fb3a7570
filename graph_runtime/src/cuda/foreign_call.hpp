#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "stepgraph/cuda/foreign_work.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::cuda {

using foreign_callback = std::function<void(const foreign_context&)>;

/// Calls foreign work in a range of its name. Throws what it throws; throws capture_error if it
/// returns with the stream's capture, if there was one, invalidated or ended.
void call_foreign_work(const plan_node& node, const foreign_callback& work,
                       const foreign_context& context);

/// What foreign work added to the graph that its stream is captured into.
struct captured_foreign_work {
  std::vector<cudaGraphNode_t> nodes;
  bool forked = false;  ///< ends with nodes that the stream does not wait for
};

/// The same on a stream that is being captured, with account of what was captured.
captured_foreign_work capture_foreign_work(const plan_node& node, const foreign_callback& work,
                                           const foreign_context& context);

}  // namespace stepgraph::cuda
