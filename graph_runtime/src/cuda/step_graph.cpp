#include "step_graph.hpp"

#include <fmt/format.h>

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

}  // namespace

/// A capture in progress. One at a time: a stream that foreign work forks to belongs to a capture
/// until that ends, and may be wanted by the next.
struct step_graph::recording {
  const step_plan& plan;
  const device_step& step;
  std::vector<foreign_callback> callbacks;
  unique_stream stream;
  std::vector<unique_graph> apart = {};  ///< foreign work for bodies, by plan node; null: nothing
  std::string forked = {};            ///< foreign work that left a fork without a join
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
  recording now{plan, step, detail::callbacks_by_node(plan, foreign), make_stream()};
  now.apart.resize(plan.nodes.size());
  for (std::size_t node = 0; node < plan.nodes.size(); ++node) {
    const plan_node& planned = plan.nodes[node];
    if (!(planned.only_if_applied || (looped_ && planned.kind == node_kind::foreign))) continue;
    bodies_ += (bodies_.empty() ? "" : ", ") + words_of(planned);
    capture_apart(now, node);
  }
  if (looped_) {
    capture_loop(now, options.steps_per_launch);
  } else {
    capture_scope capture(now.stream.get());
    capture_step(now);
    finish_naming_forks(now, [&] { graph_ = capture.finish(); });
    carrier_kind_ = plan.nodes[step.settings_node()].kind;
    carrier_node_ = nodes_[step.settings_node()];
  }
}

void step_graph::capture_apart(recording& now, std::size_t node) {
  const plan_node& planned = now.plan.nodes[node];
  capture_scope capture(now.stream.get());
  const captured_foreign_work captured = capture_foreign_work(
      planned, now.callbacks[node], now.step.context_on(now.stream.get()));
  if (captured.forked) now.forked = planned.name;
  check_body_nodes(captured.nodes, words_of(planned));
  foreign_nodes_[node] = captured.nodes.size();
  if (captured.nodes.empty()) return;
  finish_naming_forks(now, [&] { now.apart[node] = capture.finish(); });
}

void step_graph::capture_step(recording& now) {
  const cudaStream_t stream = now.stream.get();
  for (std::size_t node = 0; node < now.plan.nodes.size(); ++node) {
    const plan_node& planned = now.plan.nodes[node];
    if (planned.only_if_applied) {
      add_branch(now, node);
    } else if (planned.kind == node_kind::foreign && looped_) {
      if (now.apart[node]) add_child_graph(stream, now.apart[node].get(), words_of(planned));
    } else if (planned.kind == node_kind::foreign) {
      const captured_foreign_work captured =
          capture_foreign_work(planned, now.callbacks[node], now.step.context_on(stream));
      if (captured.forked) now.forked = planned.name;
      foreign_nodes_[node] = captured.nodes.size();
    } else {
      now.step.enqueue(node, {}, looped_ ? order_in_a_loop : now.step.order_of(node), stream);
      nodes_[node] = latest_captured_node(stream);
    }
  }
}

void step_graph::capture_loop(recording& now, std::uint32_t steps) {
  const cudaStream_t stream = now.stream.get();
  cudaGraphConditionalHandle again = 0;
  conditional_node loop;
  {
    capture_scope capture(stream);
    // Parameters of nodes inside a body cannot be changed from outside; and settings are meant for
    // a launch, not for each of its steps.
    check(launch_apply_settings(now.step.block(), {}, stream), "apply_settings");
    carrier_node_ = latest_captured_node(stream);
    again = make_condition(stream, loop_words);
    check(launch_begin_loop(again, now.step.steps_left(), steps, stream), "begin_loop");
    loop = add_conditional_node(stream, again, cudaGraphCondTypeWhile, loop_words);
    graph_ = capture.finish();
  }
  body_capture body(stream, loop.body, loop_words);
  capture_step(now);
  check(launch_end_of_step(again, now.step.steps_left(), stream), "end_of_step");
  finish_naming_forks(now, [&] { body.finish(); });
}

void step_graph::add_branch(recording& now, std::size_t node) {
  const plan_node& planned = now.plan.nodes[node];
  const cudaStream_t stream = now.stream.get();
  const std::string what = words_of(planned);
  const cudaGraphConditionalHandle applied = make_condition(stream, what);
  check(launch_set_condition(applied, now.step.block(), stream), planned.name.c_str());
  const cudaGraph_t body = add_conditional_node(stream, applied, cudaGraphCondTypeIf, what).body;
  fill_body(body, now.apart[node].get());
}

unique_graph_exec step_graph::instantiate() const {
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph_.get(), 0);
  if (status == cudaSuccess || bodies_.empty()) {
    check(status, "cudaGraphInstantiate");
    return unique_graph_exec(executable);
  }
  static_cast<void>(cudaGetLastError());
  throw capture_error(
      fmt::format("cannot instantiate the graph: {} ({}); in conditional bodies, "
                  "which hold fewer kinds of work, it has {}",
                  cudaGetErrorString(status), cudaGetErrorName(status), bodies_));
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
