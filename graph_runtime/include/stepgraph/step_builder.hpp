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

  /// Refuses a loss scale that is not positive and finite, and a negative or NaN max_grad_norm.
  void set_options(const step_options& options);

  /// The plan. Refuses operands that share memory. Tensors of the same signature join one node
  /// whatever their group; empty tensors take part in nothing but the checks.
  step_plan build() const;

 private:
  plan_purpose purpose_;
  std::vector<group_options> groups_;
  std::vector<plan_tensor> tensors_;
  std::unordered_set<std::string> names_;
  step_options options_;
};

}  // namespace stepgraph
