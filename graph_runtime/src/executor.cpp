#include "stepgraph/executor.hpp"

#include <fmt/format.h>

#include "ledger_access.hpp"
#include "option_checks.hpp"
#include "pending_changes.hpp"
#include "record_ring.hpp"
#include "step_tables.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph {

executor::executor(step_plan plan)
    : plan_(std::make_unique<step_plan>(std::move(plan))),
      tables_(std::make_unique<detail::step_tables>(*plan_)),
      pending_(std::make_unique<detail::pending_changes>(plan_->groups.size())),
      records_(std::make_unique<detail::record_reader>()),
      ledger_(std::make_unique<address_ledger>()) {
  detail::check_runnable(*plan_);
  detail::ledger_access::rows rows =
      detail::ledger_access::rows_of(*plan_, tables_->tensors, *ledger_);
  detail::ledger_access::replace(*ledger_, rows);
}

executor::~executor() = default;
executor::executor(executor&&) noexcept = default;
executor& executor::operator=(executor&&) noexcept = default;

const step_plan& executor::plan() const noexcept { return *plan_; }

void executor::check_group(group_id group) const {
  if (group >= plan_->groups.size()) {
    throw usage_error(fmt::format("group {} does not exist, the plan has {} groups", group,
                                  plan_->groups.size()));
  }
}

void executor::check_measures(const char* option) const {
  if (measures_gradients(plan_->options)) return;
  throw usage_error(fmt::format(
      "{} cannot be set: the plan does not measure the gradient norm, expected a plan with "
      "skip_non_finite, max_grad_norm or measure_norm",
      option));
}

void executor::set_learning_rate(group_id group, double value) {
  auto change = pending_->lock_open();
  check_group(group);
  detail::check_learning_rate(plan_->groups[group].name, value);
  change.set(group, setting_field::learning_rate, value);
}

void executor::resume_schedule(group_id group) {
  auto change = pending_->lock_open();
  check_group(group);
  if (!plan_->groups[group].learning_rate_schedule) {
    throw usage_error(fmt::format("group '{}': has no learning rate schedule to resume",
                                  plan_->groups[group].name));
  }
  change.set(group, setting_field::resume_learning_rate, 0.0);
}

void executor::resume_weight_decay_schedule(group_id group) {
  auto change = pending_->lock_open();
  check_group(group);
  if (!plan_->groups[group].weight_decay_schedule) {
    throw usage_error(fmt::format("group '{}': has no weight decay schedule to resume",
                                  plan_->groups[group].name));
  }
  change.set(group, setting_field::resume_weight_decay, 0.0);
}

void executor::set_weight_decay(group_id group, double value) {
  auto change = pending_->lock_open();
  check_group(group);
  detail::check_weight_decay(plan_->groups[group].name, value);
  change.set(group, setting_field::weight_decay, value);
}

void executor::set_betas(group_id group, double beta1, double beta2) {
  auto change = pending_->lock_open();
  check_group(group);
  detail::check_betas(plan_->groups[group].name, beta1, beta2);
  change.set(group, setting_field::beta1, beta1);
  change.set(group, setting_field::beta2, beta2);
}

void executor::set_eps(group_id group, double value) {
  auto change = pending_->lock_open();
  check_group(group);
  detail::check_eps(plan_->groups[group].name, value);
  change.set(group, setting_field::eps, value);
}

void executor::set_group_step(group_id group, std::uint64_t step) {
  auto change = pending_->lock_open();
  check_group(group);
  // Settings travel as doubles, which are exact up to 2^53 steps.
  change.set(group, setting_field::group_step, static_cast<double>(step));
}

void executor::set_step(std::uint64_t step) {
  auto change = pending_->lock_open();
  change.set(whole_step, setting_field::step, static_cast<double>(step));
}

void executor::set_loss_scale(double value) {
  auto change = pending_->lock_open();
  detail::check_loss_scale(value);
  change.set(whole_step, setting_field::loss_scale, value);
}

void executor::set_max_grad_norm(double value) {
  auto change = pending_->lock_open();
  detail::check_max_grad_norm(value);
  check_measures("max_grad_norm");
  change.set(whole_step, setting_field::max_grad_norm, value);
}

void executor::set_skip_above_norm(double value) {
  auto change = pending_->lock_open();
  detail::check_skip_above_norm(value);
  check_measures("skip_above_norm");
  change.set(whole_step, setting_field::skip_above_norm, value);
}

void executor::set_samples_per_step(std::uint64_t samples) {
  auto change = pending_->lock_open();
  change.set(whole_step, setting_field::samples_per_step, static_cast<double>(samples));
}

void executor::load_state(const step_status& state) {
  auto change = pending_->lock_open();
  if (state.groups.size() != plan_->groups.size()) {
    throw usage_error(fmt::format("the state has {} groups, expected {} as the plan",
                                  state.groups.size(), plan_->groups.size()));
  }
  const loss_scale_state& scale = state.next_loss_scale;
  detail::check_loss_scale(static_cast<double>(scale.scale));
  const auto set = [&](setting_field field, auto value) {
    change.set(whole_step, field, static_cast<double>(value));
  };
  set(setting_field::step, state.step);
  set(setting_field::skipped, state.skipped);
  set(setting_field::samples, state.samples);
  set(setting_field::loss_scale, scale.scale);
  set(setting_field::growth_tracker, scale.growth_tracker);
  set(setting_field::hysteresis_left, scale.hysteresis_left);
  for (group_id group = 0; group < state.groups.size(); ++group) {
    change.set(group, setting_field::group_step, static_cast<double>(state.groups[group].step));
  }
}

void executor::set_records(std::unique_ptr<detail::record_ring> records) {
  records_->replace(std::move(records));
}

record_batch executor::read_records() { return records_->read(); }

void executor::check_binding(const binding& binding) const {
  const auto& [tensor, operand, data, scales, of_the_device] = binding;
  if (tensor >= plan_->tensors.size()) {
    throw usage_error(fmt::format("tensor {} does not exist, the plan has {} tensors", tensor,
                                  plan_->tensors.size()));
  }
  const plan_tensor& planned = plan_->tensors[tensor];
  const std::string& name = planned.operands.name;
  const storage_format format = detail::format_of(planned.signature, operand);
  if (format == storage_format::none) {
    throw usage_error(fmt::format("tensor '{}': has no {} to re-bind", name, name_of(operand)));
  }
  const std::uint64_t numel = planned.operands.parameter.numel;
  detail::check_address(name, name_of(operand), data, numel, format);
  const bool is_state = operand != operand_kind::parameter && operand != operand_kind::gradient;
  const bool has_scales = is_state && is_block_scaled(format) && numel != 0;
  if (has_scales != (scales != nullptr)) {
    throw usage_error(fmt::format(
        "tensor '{}': {} is {} and was re-bound with{} scales, expected "
        "it with{}",
        name, name_of(operand), name_of(format), scales ? "" : "out", has_scales ? "" : "out"));
  }
  detail::ledger_access::check_size(*ledger_, tensor, operand);
  if (of_the_device) return;
  if (numel != 0) check_memory(data, name, operand);
  if (has_scales) check_memory(scales, name, operand);
}

void executor::rebind(std::span<const binding> bindings) {
  auto change = pending_->lock_open();
  for (const binding& binding : bindings) check_binding(binding);
  for (const binding& binding : bindings) {
    tables_->rebind(binding.tensor, binding.operand, binding.data, binding.scales);
    detail::ledger_access::bound(*ledger_, binding.tensor, binding.operand, binding.data);
  }
  if (!bindings.empty()) change.add({.tensors = true});
}

void executor::rebind(tensor_id tensor, operand_kind operand, void* data, std::uint8_t* scales) {
  const binding single = {tensor, operand, data, scales};
  rebind(std::span(&single, 1));
}

}  // namespace stepgraph
