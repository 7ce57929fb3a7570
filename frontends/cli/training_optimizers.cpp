#include "training_optimizers.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "stepgraph/error.hpp"
#include "stepgraph/schedule.hpp"

namespace stepgraph::cli {
namespace {

/// Matrices decay; biases and the scales of the norms do not.
struct parameter_groups {
  std::vector<torch::Tensor> matrices;
  std::vector<torch::Tensor> vectors;
  std::vector<std::string> names;  ///< of the matrices, then of the vectors

  explicit parameter_groups(const char_transformer& model) {
    std::vector<std::string> vector_names;
    for (const auto& parameter : model.named_parameters()) {
      const bool is_matrix = parameter.value().dim() >= 2;
      (is_matrix ? matrices : vectors).push_back(parameter.value());
      (is_matrix ? names : vector_names).push_back(parameter.key());
    }
    names.insert(names.end(), vector_names.begin(), vector_names.end());
  }

  std::vector<torch::Tensor> all() const {
    std::vector<torch::Tensor> result = matrices;
    result.insert(result.end(), vectors.begin(), vectors.end());
    return result;
  }
};

libtorch::AdamOptions adam_options(const training_settings& settings) {
  return libtorch::AdamOptions()
      .schedule(settings.learning_rate)
      .betas({settings.beta1, settings.beta2})
      .eps(settings.eps)
      .master_weights(settings.type != parameter_type::f32);
}

std::vector<torch::optim::OptimizerParamGroup> stepgraph_groups(const parameter_groups& groups,
                                                                const training_settings& settings) {
  std::vector<torch::optim::OptimizerParamGroup> result;
  result.emplace_back(groups.matrices,
                      std::make_unique<libtorch::AdamOptions>(
                          adam_options(settings)
                              .weight_decay(settings.weight_decay)
                              .weight_decay_schedule(settings.weight_decay_schedule)));
  result.emplace_back(groups.vectors,
                      std::make_unique<libtorch::AdamOptions>(adam_options(settings)));
  return result;
}

}  // namespace

stepgraph_optimizer::stepgraph_optimizer(const char_transformer& model,
                                         const training_settings& settings)
    : optimizer_(stepgraph_groups(parameter_groups(model), settings), {},
                 libtorch::StepOptions()
                     .max_grad_norm(settings.max_grad_norm)
                     .skip_above_norm(settings.skip_above_norm)
                     .loss_scale(settings.loss_scale)
                     .scaling(settings.scaling)
                     .zero_gradients(true)
                     .record_capacity(4)
                     .names(parameter_groups(model).names)) {}

step_report stepgraph_optimizer::report() {
  const record_batch batch = optimizer_.records();
  if (batch.records.empty()) throw error("the step has finished and wrote no record");
  const step_record& record = batch.records.back();
  return {.learning_rate = record.groups.front().learning_rate,
          .weight_decay = record.groups.front().weight_decay,
          .grad_norm = record.grad_norm,
          .loss_scale = record.loss_scale,
          .skipped = record.was_skipped};
}

double stepgraph_optimizer::next_loss_scale() {
  return static_cast<double>(optimizer_.status().next_loss_scale.scale);
}

std::vector<torch::Tensor> stepgraph_optimizer::states() const {
  std::vector<torch::Tensor> result;
  for (const torch::optim::OptimizerParamGroup& group : optimizer_.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      const auto& state = static_cast<const libtorch::AdamParamState&>(
          *optimizer_.state().at(parameter.unsafeGetTensorImpl()));
      for (const torch::Tensor& tensor : {state.master(), state.exp_avg(), state.exp_avg_sq()}) {
        if (tensor.defined()) result.push_back(tensor);
      }
    }
  }
  return result;
}

reference_optimizer::reference_optimizer(const char_transformer& model,
                                         const training_settings& settings)
    : settings_(settings) {
  const parameter_groups groups(model);
  parameters_ = groups.all();
  for (const torch::Tensor& parameter : parameters_) {
    masters_.push_back(settings.type == parameter_type::f32
                           ? parameter
                           : parameter.detach().to(torch::kFloat).requires_grad_(true));
  }
  const auto split = masters_.begin() + static_cast<std::ptrdiff_t>(groups.matrices.size());
  std::vector<torch::optim::OptimizerParamGroup> master_groups;
  const auto add = [&](std::vector<torch::Tensor> masters, double weight_decay) {
    master_groups.emplace_back(std::move(masters), std::make_unique<torch::optim::AdamWOptions>(
                                                       torch::optim::AdamWOptions()
                                                           .betas({settings.beta1, settings.beta2})
                                                           .eps(settings.eps)
                                                           .weight_decay(weight_decay)));
  };
  add({masters_.begin(), split}, settings.weight_decay);
  add({split, masters_.end()}, 0.0);
  optimizer_ = std::make_unique<torch::optim::AdamW>(std::move(master_groups));
  scale_.scale = static_cast<float>(settings.loss_scale);
  scale_.hysteresis_left = static_cast<std::int32_t>(settings.scaling.hysteresis);
}

torch::Tensor reference_optimizer::loss_scale() {
  return torch::full({}, scale_.scale, parameters_.front().options().dtype(torch::kFloat));
}

void reference_optimizer::prepare() {
  const double rate = value_at(settings_.learning_rate, applied_);
  const double decay = settings_.weight_decay_schedule
                           ? value_at(*settings_.weight_decay_schedule, applied_)
                           : settings_.weight_decay;
  const auto options = [&](std::size_t group) -> torch::optim::AdamWOptions& {
    return static_cast<torch::optim::AdamWOptions&>(optimizer_->param_groups()[group].options());
  };
  options(0).lr(rate).weight_decay(decay);
  options(1).lr(rate);
  report_.learning_rate = rate;
  report_.weight_decay = decay;
}

void reference_optimizer::step() {
  const torch::NoGradGuard no_grad;
  const bool has_masters = settings_.type != parameter_type::f32;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (has_masters) masters_[i].mutable_grad() = parameters_[i].grad().to(torch::kFloat);
    if (settings_.scales_loss()) masters_[i].mutable_grad().div_(scale_.scale);
  }
  const bool dynamic = settings_.scaling.rule != loss_scale_rule::fixed;
  const bool measures = settings_.max_grad_norm > 0.0 || settings_.skip_above_norm > 0.0 || dynamic;
  const double largest = settings_.max_grad_norm > 0.0 ? settings_.max_grad_norm
                                                       : std::numeric_limits<double>::infinity();
  report_.loss_scale = static_cast<double>(scale_.scale);
  report_.grad_norm = measures ? torch::nn::utils::clip_grad_norm_(masters_, largest) : 0.0;
  const bool found_inf = !std::isfinite(report_.grad_norm);
  report_.skipped =
      (found_inf && (dynamic || settings_.max_grad_norm > 0.0)) ||
      (settings_.skip_above_norm > 0.0 && report_.grad_norm > settings_.skip_above_norm);
  if (!report_.skipped) {
    optimizer_->step();
    ++applied_;
    if (has_masters) {
      for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].copy_(masters_[i]);
    }
  }
  scale_ = math::updated_loss_scale(settings_.scaling, scale_, found_inf);
  for (const torch::Tensor& parameter : parameters_) parameter.mutable_grad().zero_();
}

}  // namespace stepgraph::cli
