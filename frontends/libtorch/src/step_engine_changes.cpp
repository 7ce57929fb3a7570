#include <ATen/Functions.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <span>
#include <utility>

#include "step_engine.hpp"
#include "stepgraph/error.hpp"

// What the user may change between steps, found by comparing with what the executor was told.

namespace stepgraph::libtorch::detail {

bool step_engine::revalidate(param_groups& groups, const param_states& states) {
  if (groups.size() != groups_.size() || !inputs_are_bound()) return false;
  if (states_may_differ_) {
    if (!states_are_bound(states)) return false;
    states_may_differ_ = false;
  }
  tensor_id id = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const AdamOptions& options = options_of(groups[g], g);
    known_group& known = groups_[g];
    const std::vector<at::Tensor>& parameters = groups[g].params();
    if (&options != known.identity || parameters.size() != known.parameters ||
        !send_options(static_cast<group_id>(g), known, options)) {
      return false;
    }
    for (const at::Tensor& parameter : parameters) {
      bound_parameter& bound = parameters_[id];
      const c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
      // Not Tensor::grad, which also asks autograd whether the tensor is a leaf.
      const at::Tensor& gradient = impl->grad();
      if (!bound.parameter.is_surely(*impl) ||
          !bound.gradient.is_surely(*gradient.unsafeGetTensorImpl())) {
        if (!revalidate_memory(id, bound, parameter, gradient)) return false;
      }
      ++id;
    }
  }
  return true;
}

bool step_engine::inputs_are_bound() const {
  const auto is_bound = [](const at::Tensor& tensor, const held_memory& held) {
    return !tensor.defined() || held.is_surely(*tensor.unsafeGetTensorImpl());
  };
  return is_bound(options_.found_inf(), found_inf_) &&
         is_bound(options_.loss_scale_input(), loss_scale_input_);
}

bool step_engine::send_options(group_id group, known_group& known, const AdamOptions& options) {
  AdamOptions& sent = known.sent;
  const at::Tensor& lr_tensor = options.lr_tensor();
  if (lr_tensor.defined() && !known.lr_tensor.is_surely(*lr_tensor.unsafeGetTensorImpl())) {
    return false;
  }
  if (options == sent) return true;
  if (!same_plan_options(options, sent)) return false;
  executor& core = runner_->core();
  // Each value is noted only once the executor has accepted it, so a refused one is refused again
  // at the next step instead of being forgotten.
  if (options.lr() != sent.lr()) {
    core.set_learning_rate(group, options.lr());
    sent.lr(options.lr());
    known.held.learning_rate = true;
    pending_ = true;
  }
  if (options.betas() != sent.betas()) {
    core.set_betas(group, std::get<0>(options.betas()), std::get<1>(options.betas()));
    sent.betas(options.betas());
    pending_ = true;
  }
  if (options.eps() != sent.eps()) {
    core.set_eps(group, options.eps());
    sent.eps(options.eps());
    pending_ = true;
  }
  if (options.weight_decay() != sent.weight_decay()) {
    core.set_weight_decay(group, options.weight_decay());
    sent.weight_decay(options.weight_decay());
    known.held.weight_decay = true;
    pending_ = true;
  }
  return true;
}

bool step_engine::revalidate_memory(tensor_id id, bound_parameter& bound,
                                    const at::Tensor& parameter, const at::Tensor& gradient) {
  if (parameter.unsafeGetTensorImpl() != bound.parameter.tensor().unsafeGetTensorImpl()) {
    return false;
  }
  check_parameter(bound.name, parameter);
  if (parameter.device() != *device_) {
    throw usage_error(fmt::format(
        "{}: the parameter moved to {} after a step on {}; load a checkpoint of this optimizer "
        "into a new one instead",
        bound.name, parameter.device().str(), device_->str()));
  }
  check_gradient(bound.name, parameter, gradient);
  const plan_tensor& planned = runner_->core().plan().tensors[id];
  if (static_cast<std::uint64_t>(parameter.numel()) != planned.operands.parameter.numel) {
    throw usage_error(
        fmt::format("{}: the parameter has {} elements, expected {} as at the step "
                    "before",
                    bound.name, parameter.numel(), planned.operands.parameter.numel));
  }
  if (parameter.dtype() != bound.parameter.type() || gradient.dtype() != bound.gradient.type()) {
    return false;
  }
  if (!same_layout(parameter, bound.state[0].tensor())) return false;
  rebind(id, operand_kind::parameter, bound.parameter, held_memory(parameter), bound.name);
  rebind(id, operand_kind::gradient, bound.gradient, held_memory(gradient), bound.name);
  return true;
}

void step_engine::rebind(tensor_id id, operand_kind operand, held_memory& held, held_memory now,
                         const std::string& name) {
  if (now.data() != held.data()) {
    if (runner_->captured()) {
      throw usage_error(fmt::format(
          "{}: the {} moved to other memory after the step was captured; replays would go on using "
          "the old one. Keep it in place (zero_grad(false)), or call abandon_captured_steps when "
          "the captured graphs are gone",
          name, stepgraph::name_of(operand)));
    }
    const binding moved = {id, operand, now.data(), nullptr, true};  // the tensor knows its device
    runner_->core().rebind(std::span(&moved, 1));
    pending_ = true;
    ++rebinds_;
  }
  runner_->retire(held.storage());
  held = std::move(now);
}

bool step_engine::states_are_bound(const param_states& states) const {
  const auto is_bound = [](const at::Tensor& tensor, const held_memory& held) {
    if (!tensor.defined() || !held.tensor().defined())
      return tensor.defined() == held.tensor().defined();
    return tensor.layout() == at::kStrided && tensor.scalar_type() == at::kFloat &&
           tensor.mutable_data_ptr() == held.data() && same_layout(tensor, held.tensor()) &&
           tensor.storage().unsafeGetStorageImpl() == held.storage().unsafeGetStorageImpl();
  };
  return std::all_of(parameters_.begin(), parameters_.end(), [&](const bound_parameter& bound) {
    const AdamParamState* state = find_state(states, bound.parameter.tensor());
    return state != nullptr && is_bound(state->exp_avg(), bound.state[0]) &&
           is_bound(state->exp_avg_sq(), bound.state[1]) &&
           is_bound(state->master(), bound.state[2]);
  });
}

}  // namespace stepgraph::libtorch::detail
