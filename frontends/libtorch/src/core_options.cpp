#include "core_options.hpp"

#include <fmt/format.h>
#include <torch/types.h>

#include <typeinfo>

#include "stepgraph/error.hpp"
#include "tensor_checks.hpp"

namespace stepgraph::libtorch::detail {
namespace {

/// The memory of an input, or null without one.
const float* input_of(const char* name, const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  check_scalar_input(name, tensor);
  return tensor.const_data_ptr<float>();
}

}  // namespace

group_options to_core(const AdamOptions& options, std::string name, std::uint64_t step) {
  group_options core;
  core.name = std::move(name);
  core.learning_rate = options.lr();
  core.beta1 = std::get<0>(options.betas());
  core.beta2 = std::get<1>(options.betas());
  core.eps = options.eps();
  core.weight_decay = options.weight_decay();
  core.mode = options.mode();
  core.bias_correction = options.bias_correction();
  core.maximize = options.maximize();
  core.learning_rate_schedule = options.schedule();
  core.weight_decay_schedule = options.weight_decay_schedule();
  core.learning_rate_input = input_of("lr_tensor", options.lr_tensor());
  core.step = step;
  return core;
}

step_options to_core(const StepOptions& options) {
  step_options core;
  core.skip_non_finite = options.skip_non_finite();
  core.max_grad_norm = options.max_grad_norm();
  core.skip_above_norm = options.skip_above_norm();
  core.norm = options.norm();
  core.measure_norm = options.measure_norm();
  core.count_zeros = options.count_zeros();
  core.loss_scale = options.loss_scale();
  core.scaling = options.scaling();
  core.zero_gradients = options.zero_gradients();
  core.unscale_gradients = options.unscale_gradients();
  core.found_inf_input = input_of("found_inf", options.found_inf());
  core.loss_scale_input = input_of("loss_scale_input", options.loss_scale_input());
  core.samples_per_step = options.samples_per_step();
  core.record_capacity = options.record_capacity();
  return core;
}

AdamOptions& options_of(torch::optim::OptimizerParamGroup& group, std::size_t index) {
  auto& options = group.options();
  if (typeid(options) != typeid(AdamOptions)) {
    throw usage_error(fmt::format(
        "group {}: its options are of another type, expected stepgraph::libtorch::AdamOptions",
        index));
  }
  return static_cast<AdamOptions&>(options);
}

bool same_plan_options(const AdamOptions& a, const AdamOptions& b) {
  return a.mode() == b.mode() && a.bias_correction() == b.bias_correction() &&
         a.maximize() == b.maximize() && a.schedule() == b.schedule() &&
         a.weight_decay_schedule() == b.weight_decay_schedule() &&
         a.lr_tensor().is_same(b.lr_tensor()) && a.master_weights() == b.master_weights();
}

AdamParamState* find_state(const param_states& states, const at::Tensor& parameter) {
  const auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found == states.end() || !found->second) return nullptr;
  return dynamic_cast<AdamParamState*>(found->second.get());
}

}  // namespace stepgraph::libtorch::detail
