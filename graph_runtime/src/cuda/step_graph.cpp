#include "step_graph.hpp"

#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"

namespace stepgraph::cuda {

step_graph::step_graph(const step_plan& plan, const device_step& step) {
  const device_guard guard(step.device());
  // Captured apart from the caller's stream, which may be the legacy default stream.
  const unique_stream stream = make_stream();
  capture_scope capture(stream.get());
  for (std::size_t node = 0; node < plan.nodes.size(); ++node) {
    step.enqueue(node, {}, stream.get());
    nodes_.push_back(capture.latest_node());
  }
  graph_ = capture.finish();
}

settings_carrier::settings_carrier(cudaGraphNode_t node, node_kind kind) : node_(node) {
  STEPGRAPH_CUDA_CHECK(cudaGraphKernelNodeGetParams(node, &parameters_));
  const bool measures = kind == node_kind::grad_stats;
  position_ = measures ? settings_argument_of_grad_stats : settings_argument_of_advance_step;
  const int count = measures ? arguments_of_grad_stats : arguments_of_advance_step;
  arguments_.assign(parameters_.kernelParams, parameters_.kernelParams + count);
}

void settings_carrier::write(cudaGraphExec_t executable, const settings_batch& settings) {
  settings_batch batch = settings;
  arguments_[position_] = &batch;
  parameters_.kernelParams = arguments_.data();
  STEPGRAPH_CUDA_CHECK(cudaGraphExecKernelNodeSetParams(executable, node_, &parameters_));
}

}  // namespace stepgraph::cuda
