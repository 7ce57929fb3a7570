#include "step_graph.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "../foreign_callbacks.hpp"
#include "capture_state.hpp"
#include "conditional.hpp"
#include "node_table.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"
#include "trace.hpp"

namespace stepgraph::cuda {
namespace {

// How kernels of one step follow each other inside the body of the loop. Nothing says that edges
// there may be programmatic.
constexpr launch_order order_in_a_loop = launch_order::full;

constexpr const char* loop_words = "steps_per_launch";

std::string words_of(const plan_node& node) { return fmt::format("foreign work '{}'", node.name); }

void check_support(const step_plan& plan, const graph_options& options) {
  if (options.steps_per_launch == 0) {
    throw usage_error("steps_per_launch is 0, expected at least 1");
  }
  if (options.steps_per_launch > 1) check_conditional_nodes(loop_words);
  for (const plan_node& node : plan.nodes) {
    if (node.only_if_applied) check_conditional_nodes(words_of(node) + ": only_if_applied");
  }
}

bool has_branches(const step_plan& plan) {
  return std::any_of(plan.nodes.begin(), plan.nodes.end(),
                     [](const plan_node& node) { return node.only_if_applied; });
}

}  // namespace

/// A capture in progress.
struct step_graph::recording {
  const step_plan& plan;
  const device_step& step;
  std::vector<foreign_callback> callbacks;
  std::uint32_t steps;
  unique_stream outer;
  // Of the bodies, where there are any; made before the first capture begins.
  unique_stream loop_body = {};
  unique_stream foreign_body = {};
  std::string forked = {};  ///< foreign work that left a branch behind
};

template <class Finish>
void step_graph::finish_naming_forks(const recording& now, Finish&& finish) {
  try {
    finish();
  } catch (const capture_error& error) {
    if (now.forked.empty()) throw;
    throw capture_error(fmt::format("{}: foreign work '{}' forked to a stream and did not join it",
                                    error.what(), now.forked));
  }
}

step_graph::step_graph(const step_plan& plan, const device_step& step, const foreign_work& foreign,
                       const graph_options& options)
    : nodes_(plan.nodes.size(), nullptr),
      foreign_nodes_(plan.nodes.size(), 0),
      looped_(options.steps_per_launch > 1) {
  check_support(plan, options);
  const device_guard guard(step.device());
  const trace_range range("stepgraph capture");
  // Captured apart from the caller's stream, which may be the legacy default stream.
  recording now{plan, step, detail::callbacks_by_node(plan, foreign), options.steps_per_launch,
                make_stream()};
  if (looped_) now.loop_body = make_stream();
  if (has_branches(plan)) now.foreign_body = make_stream();
  capture_scope capture(now.outer.get());
  if (looped_) {
    capture_loop(now, now.outer.get());
  } else {
    capture_step(now, now.outer.get());
  }
  finish_naming_forks(now, [&] { graph_ = capture.finish(); });
}

void step_graph::capture_step(recording& now, cudaStream_t stream) {
  for (std::size_t node = 0; node < now.plan.nodes.size(); ++node) {
    if (now.plan.nodes[node].kind == node_kind::foreign) {
      capture_foreign(now, node, stream);
      continue;
    }
    const launch_order order = looped_ ? order_in_a_loop : now.step.order_of(node);
    now.step.enqueue(node, {}, order, stream);
    nodes_[node] = latest_captured_node(stream);
  }
  if (looped_) return;
  carrier_kind_ = now.plan.nodes[now.step.settings_node()].kind;
  carrier_node_ = nodes_[now.step.settings_node()];
}

void step_graph::capture_loop(recording& now, cudaStream_t stream) {
  // Parameters of nodes inside a body cannot be changed from outside; and settings are meant for a
  // launch, not for each of its steps.
  check(launch_apply_settings(now.step.block(), {}, stream), "apply_settings");
  carrier_node_ = latest_captured_node(stream);
  const cudaGraphConditionalHandle again = make_condition(stream, loop_words);
  check(launch_begin_loop(again, now.step.steps_left(), now.steps, stream), "begin_loop");
  const conditional_node loop =
      add_conditional_node(stream, again, cudaGraphCondTypeWhile, loop_words);
  body_capture body(now.loop_body.get(), loop.body, loop_words);
  capture_step(now, now.loop_body.get());
  check(launch_end_of_step(again, now.step.steps_left(), now.loop_body.get()), "end_of_step");
  finish_naming_forks(now, [&] { body.finish(); });
}

void step_graph::capture_foreign(recording& now, std::size_t node, cudaStream_t stream) {
  const plan_node& planned = now.plan.nodes[node];
  const foreign_callback& work = now.callbacks[node];
  const std::string what = words_of(planned);
  captured_foreign_work captured;
  if (planned.only_if_applied) {
    const cudaGraphConditionalHandle applied = make_condition(stream, what);
    check(launch_set_condition(applied, now.step.block(), stream), planned.name.c_str());
    const conditional_node branch =
        add_conditional_node(stream, applied, cudaGraphCondTypeIf, what);
    body_capture body(now.foreign_body.get(), branch.body, what);
    captured = capture_foreign_work(planned, work, now.step.context_on(now.foreign_body.get()));
    check_enclosing_capture(planned, stream);
    body.finish();
  } else {
    captured = capture_foreign_work(planned, work, now.step.context_on(stream));
    if (captured.forked) now.forked = planned.name;
  }
  if (looped_) check_enclosing_capture(planned, now.outer.get());
  if (looped_ || planned.only_if_applied) check_body_nodes(captured.nodes, what);
  foreign_nodes_[node] = captured.nodes.size();
}

settings_carrier step_graph::carrier() const {
  if (looped_) {
    return {carrier_node_, settings_argument_of_apply_settings, arguments_of_apply_settings};
  }
  if (carrier_kind_ == node_kind::grad_stats) {
    return {carrier_node_, settings_argument_of_grad_stats, arguments_of_grad_stats};
  }
  return {carrier_node_, settings_argument_of_advance_step, arguments_of_advance_step};
}

std::vector<graph_node_info> step_graph::describe(const step_plan& plan) const {
  std::vector<graph_node_info> result;
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    result.push_back(nodes_[node] != nullptr
                         ? describe_kernel(plan.nodes[node], nodes_[node])
                         : describe_foreign(plan.nodes[node], foreign_nodes_[node]));
  }
  return result;
}

settings_carrier::settings_carrier(cudaGraphNode_t node, int position, int count)
    : node_(node), position_(static_cast<std::size_t>(position)) {
  STEPGRAPH_CUDA_CHECK(cudaGraphKernelNodeGetParams(node, &parameters_));
  arguments_.assign(parameters_.kernelParams, parameters_.kernelParams + count);
}

void settings_carrier::write(cudaGraphExec_t executable, const settings_batch& settings) {
  settings_batch batch = settings;
  arguments_[position_] = &batch;
  parameters_.kernelParams = arguments_.data();
  STEPGRAPH_CUDA_CHECK(cudaGraphExecKernelNodeSetParams(executable, node_, &parameters_));
}

}  // namespace stepgraph::cuda
