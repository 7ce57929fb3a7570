#include "stepgraph/libtorch/adam.hpp"

#include <ATen/Functions.h>
#include <torch/types.h>

#include "step_engine.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/step_builder.hpp"

namespace stepgraph::libtorch {

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions defaults,
           StepOptions step_options)
    : Optimizer(groups, std::make_unique<AdamOptions>(std::move(defaults))) {
  // Refuses bad numbers here rather than at the first step.
  step_builder checks;
  checks.set_options(detail::to_core(step_options));
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    checks.add_group(detail::to_core(detail::options_of(param_groups_[g], g), "", 0));
  }
  engine_ = std::make_unique<detail::step_engine>(std::move(step_options));
}

Adam::Adam(std::vector<torch::Tensor> params, AdamOptions defaults, StepOptions step_options)
    : Adam(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(
               std::move(params))},
           std::move(defaults), std::move(step_options)) {}

Adam::~Adam() = default;
Adam::Adam(Adam&&) noexcept = default;
Adam& Adam::operator=(Adam&&) noexcept = default;

torch::Tensor Adam::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  engine_->step(param_groups_, state_);
  return loss;
}

void Adam::zero_grad(bool set_to_none) {
  if (set_to_none) {
    Optimizer::zero_grad(true);
    return;
  }
  const at::NoGradGuard no_grad;
  // Together, so that CUDA gradients take few kernels instead of one each.
  std::vector<torch::Tensor> dense;
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const torch::Tensor& parameter : group.params()) {
      torch::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (gradient.grad_fn() != nullptr) {
        gradient.detach_();
      } else {
        gradient.requires_grad_(false);
      }
      if (gradient.layout() == at::kStrided) {
        dense.push_back(gradient);
      } else {
        gradient.zero_();
      }
    }
  }
  if (!dense.empty()) at::_foreach_zero_(dense);
}

void Adam::prepare() { engine_->prepare(param_groups_, state_); }

void Adam::deliver() { engine_->deliver(param_groups_); }

void Adam::abandon_captured_steps() { engine_->abandon_captured_steps(); }

void Adam::resume_schedule(std::size_t group) { engine_->resume_schedule(param_groups_, group); }

void Adam::resume_weight_decay_schedule(std::size_t group) {
  engine_->resume_weight_decay_schedule(param_groups_, group);
}

void Adam::set_loss_scale(double value) { engine_->set_loss_scale(value); }

void Adam::set_max_grad_norm(double value) { engine_->set_max_grad_norm(value); }

void Adam::set_skip_above_norm(double value) { engine_->set_skip_above_norm(value); }

void Adam::set_samples_per_step(std::uint64_t samples) { engine_->set_samples_per_step(samples); }

torch::Tensor Adam::loss_scale_tensor() { return engine_->loss_scale_tensor(param_groups_); }

record_batch Adam::records() { return engine_->records(); }

step_status Adam::status() { return engine_->status(param_groups_, state_); }

const step_plan& Adam::plan() const { return engine_->plan(); }

std::uint64_t Adam::captures() const noexcept { return engine_->captures(); }

std::uint64_t Adam::rebinds() const noexcept { return engine_->rebinds(); }

ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& Adam::state() {
  engine_->expect_changed_states();
  return Optimizer::state();
}

const ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& Adam::state()
    const noexcept {
  return Optimizer::state();
}

}  // namespace stepgraph::libtorch
