#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "stepgraph/step_plan.hpp"

namespace stepgraph {

/// What a plan is built for.
enum class plan_purpose : std::uint8_t {
  run,      ///< every operand has memory
  inspect,  ///< shapes only: memory may be null, executors refuse the plan
};

/// On which side of a node foreign work runs.
enum class foreign_order : std::uint8_t { before, after };

/// Work of the caller's at a named point of the step: an exchange between devices, a hook, a sum.
/// The plan holds its place alone; executors get what is to be called by its name.
struct foreign_node {
  std::string name;
  foreign_order when = foreign_order::after;
  std::string node;  ///< the step's own: "grad_stats", "advance_step", "update/<signature>", ...
  /// A skipped step leaves it out. In a `graph_executor` that takes a conditional node, which costs
  /// several microseconds: for long work. Only after the node that advances the step.
  bool only_if_applied = false;
};

/// Collects groups and tensors and checks them.
///
///   step_builder builder;
///   const group_id group = builder.add_group({.name = "decay", .learning_rate = 3e-4});
///   builder.add_tensor(group, {.name = "weight", .parameter = ..., .gradient = ..., ...});
///   const step_plan plan = builder.build();
///
/// Every function throws usage_error and leaves the builder as it was before the call.
class step_builder {
 public:
  explicit step_builder(plan_purpose purpose = plan_purpose::run) : purpose_(purpose) {}

  /// Refuses non-finite or negative learning rate, eps and weight decay, betas outside [0, 1), and
  /// schedules that end before their warm-up. A group may stay without tensors; its step counts.
  group_id add_group(group_options options);

  /// Refuses a tensor without gradient, operands of different element counts or devices, null or
  /// misaligned memory, formats that no kernel handles, and names already taken.
  tensor_id add_tensor(group_id group, tensor_operands operands);

  /// Adds a gradient without a parameter: it takes part in the norm and the checks, and
  /// `unscale_gradients` scales it in place. A plan may hold nothing else.
  tensor_id add_gradient(group_id group, std::string name, tensor_view gradient);

  /// Adds foreign work. Several at one point run in the order in which they were added. Refuses an
  /// empty name and one that another foreign node has or that nodes of the step have. `build`
  /// refuses it if there is no such node, or if it depends on the step being applied and comes
  /// before that is known.
  void add_foreign_work(foreign_node work);

  /// Refuses a loss scale that is not positive and finite, negative or NaN norms, scaling rules
  /// with factors on the wrong side of one, and options that contradict each other.
  void set_options(const step_options& options);

  /// The plan. Refuses operands that share memory. Tensors of the same signature join one node
  /// whatever their group; empty tensors take part in nothing but the checks.
  step_plan build() const;

 private:
  void check_place(group_id group, const tensor_operands& operands) const;
  void check_same_device(const std::string& name, const tensor_view& view) const;
  std::uint32_t group_count() const { return static_cast<std::uint32_t>(groups_.size()); }
  std::vector<plan_node> update_nodes() const;
  plan_node statistics_node(const std::vector<plan_node>& updates, const plan_node& scaling,
                            const step_plan& plan) const;

  plan_purpose purpose_;
  std::vector<group_options> groups_;
  std::vector<plan_tensor> tensors_;
  std::unordered_set<std::string> names_;
  std::vector<foreign_node> foreign_;
  step_options options_;
};

}  // namespace stepgraph
