#pragma once

#include "stepgraph/math/adam.hpp"
#include "stepgraph/math/bias_correction.hpp"
#include "stepgraph/math/clip.hpp"
#include "stepgraph/math/gradient_norm.hpp"
#include "stepgraph/math/step_scalars.hpp"

/// The arithmetic of the `advance_step` node: the one writer of the step scalars.
///
/// It comes in two halves. `prepare_*` is what does not depend on the gradients: loss scale,
/// schedules and bias corrections of the step to come, as if it were applied. `decide_step` says
/// whether it is, and with which clip coefficient, and `finish_*` carries that out. On a device the
/// first half runs while the gradients are still being read.
namespace stepgraph::math {

/// Applies one setting of a group.
STEPGRAPH_HOST_DEVICE void apply_setting(group_settings& settings, group_progress& progress,
                                         setting_field field, double value) {
  switch (field) {
    case setting_field::learning_rate:
      settings.learning_rate = value;
      settings.learning_rate_schedule.held_by_hand = 1;
      break;
    case setting_field::resume_learning_rate:
      settings.learning_rate_schedule.held_by_hand = 0;
      break;
    case setting_field::weight_decay:
      settings.weight_decay = value;
      settings.weight_decay_schedule.held_by_hand = 1;
      break;
    case setting_field::resume_weight_decay:
      settings.weight_decay_schedule.held_by_hand = 0;
      break;
    case setting_field::beta1:
      settings.beta1 = value;
      break;
    case setting_field::beta2:
      settings.beta2 = value;
      break;
    case setting_field::eps:
      settings.eps = value;
      break;
    case setting_field::group_step:
      progress.step = static_cast<std::uint64_t>(value);
      break;
    default:
      break;
  }
}

/// Applies one setting of the whole step.
STEPGRAPH_HOST_DEVICE void apply_setting(step_settings& settings, step_scalars& scalars,
                                         setting_field field, double value) {
  switch (field) {
    case setting_field::loss_scale:
      scalars.next_loss_scale.scale = static_cast<float>(value);
      break;
    case setting_field::growth_tracker:
      scalars.next_loss_scale.growth_tracker = static_cast<std::uint32_t>(value);
      break;
    case setting_field::hysteresis_left:
      scalars.next_loss_scale.hysteresis_left = static_cast<std::int32_t>(value);
      break;
    case setting_field::max_grad_norm:
      settings.max_grad_norm = value;
      break;
    case setting_field::skip_above_norm:
      settings.skip_above_norm = value;
      break;
    case setting_field::samples_per_step:
      settings.samples_per_step = static_cast<std::uint64_t>(value);
      break;
    case setting_field::step:
      scalars.step = static_cast<std::uint64_t>(value);
      break;
    case setting_field::skipped:
      scalars.skipped = static_cast<std::uint64_t>(value);
      break;
    case setting_field::samples:
      scalars.samples = static_cast<std::uint64_t>(value);
      break;
    default:
      break;
  }
}

/// What the step to come needs of the whole step, before its gradients are known.
struct prepared_step {
  double inverse_scale = 1.0;  ///< 1 / loss scale
  float loss_scale = 1.0f;
  std::uint32_t found_inf = 0;  ///< the input says so
};

/// A group as the step to come leaves it if it is applied.
struct alignas(16) prepared_group {
  adam_terms terms;  ///< gradient_scale holds the sign alone
  group_progress progress;
};

STEPGRAPH_HOST_DEVICE prepared_step prepare_step(const step_settings& settings,
                                                 const step_scalars& scalars) {
  prepared_step prepared;
  prepared.loss_scale = settings.loss_scale_input != nullptr ? *settings.loss_scale_input
                                                             : scalars.next_loss_scale.scale;
  prepared.inverse_scale = 1.0 / static_cast<double>(prepared.loss_scale);
  // Not equal to zero, which NaN is not either.
  const bool found_inf =
      settings.found_inf_input != nullptr && !(*settings.found_inf_input == 0.0f);
  prepared.found_inf = found_inf ? 1u : 0u;
  return prepared;
}

/// A value of a group's next update: the input, if there is one, else what its schedule says,
/// unless it is held by hand, else the value itself.
STEPGRAPH_HOST_DEVICE double next_value(const float* input, const schedule_reference& schedule,
                                        double value, const schedule_tables& tables,
                                        std::uint64_t updates, std::uint64_t samples) {
  if (input != nullptr) return static_cast<double>(*input);
  if (schedule.count == 0 || schedule.held_by_hand != 0) return value;
  return value_at(tables.segments + schedule.first, schedule.count, tables.table,
                  schedule.counts_samples != 0 ? samples : updates);
}

/// The learning rate of a group's next update.
STEPGRAPH_HOST_DEVICE double next_learning_rate(const group_settings& settings,
                                                const group_progress& progress,
                                                const schedule_tables& tables,
                                                std::uint64_t samples) {
  return next_value(settings.learning_rate_input, settings.learning_rate_schedule,
                    settings.learning_rate, tables, progress.step, samples);
}

/// The weight decay of a group's next update.
STEPGRAPH_HOST_DEVICE double next_weight_decay(const group_settings& settings,
                                               const group_progress& progress,
                                               const schedule_tables& tables,
                                               std::uint64_t samples) {
  return next_value(settings.weight_decay_input, settings.weight_decay_schedule,
                    settings.weight_decay, tables, progress.step, samples);
}

/// The bias correction of a moment with decay rate `beta` at a group's next update.
STEPGRAPH_HOST_DEVICE double next_bias_correction(const group_settings& settings, double beta,
                                                  const group_progress& progress) {
  const bool corrected = (settings.flags & group_bias_correction) != 0;
  return corrected ? bias_correction(beta, progress.step + 1) : 1.0;
}

STEPGRAPH_HOST_DEVICE prepared_group prepare_group(const group_settings& settings,
                                                   const group_progress& progress,
                                                   double learning_rate, double weight_decay,
                                                   double correction1, double correction2) {
  const bool decoupled = (settings.flags & group_decoupled_weight_decay) != 0;
  prepared_group prepared;
  prepared.progress = {progress.step + 1, learning_rate, weight_decay};
  adam_terms& terms = prepared.terms;
  terms.gradient_scale = (settings.flags & group_maximize) != 0 ? -1.0f : 1.0f;
  terms.one_minus_beta1 = static_cast<float>(1.0 - settings.beta1);
  terms.one_minus_beta2 = static_cast<float>(1.0 - settings.beta2);
  terms.step_size = static_cast<float>(learning_rate / correction1);
  terms.inverse_sqrt_bias2 = static_cast<float>(1.0 / square_root(correction2));
  terms.eps = static_cast<float>(settings.eps);
  terms.l2_weight_decay = static_cast<float>(decoupled ? 0.0 : weight_decay);
  terms.decoupled_shrinkage = static_cast<float>(decoupled ? learning_rate * weight_decay : 0.0);
  return prepared;
}

/// The norm that a total stands for, of the unscaled gradient; infinity if it is not finite.
STEPGRAPH_HOST_DEVICE double norm_of_total(norm_kind kind, double total, double inverse_scale) {
  if (!is_finite(total)) return __builtin_inf();
  return (kind == norm_kind::l2 ? square_root(total) : total) * inverse_scale;
}

/// The total of two parts of a gradient.
STEPGRAPH_HOST_DEVICE double joined_total(norm_kind norm, double a, double b) {
  return norm == norm_kind::l2 ? a + b : larger_total(a, b);
}

/// The total of the whole gradient from those of its norm groups, in their order.
STEPGRAPH_HOST_DEVICE double combined_total(const double* totals, std::uint32_t norm_groups,
                                            norm_kind norm) {
  double total = 0.0;
  for (std::uint32_t i = 0; i < norm_groups; ++i) {
    total = joined_total(norm, total, totals[i]);
  }
  return total;
}

/// What the gradients decide, and all that the update of a group waits for.
struct step_decision {
  double norm;           ///< as step_scalars::grad_norm
  double clip;           ///< clip coefficient
  float gradient_scale;  ///< clip coefficient / loss scale
  bool shrinks_scale;    ///< the loss scale takes the step for one that was not finite
  bool found_inf;        ///< as step_scalars::found_inf
  bool skip;
};

STEPGRAPH_HOST_DEVICE step_decision decide_step(const step_settings& settings,
                                                const prepared_step& prepared,
                                                const gradient_statistics& statistics) {
  const bool non_finite = statistics.measured != 0 && !is_finite(statistics.total);
  step_decision decision;
  decision.norm = statistics.measured != 0
                      ? norm_of_total(settings.norm, statistics.total, prepared.inverse_scale)
                      : 0.0;
  // A norm that is not finite cannot be clipped.
  const bool skips_non_finite = settings.skip_non_finite != 0 || settings.max_grad_norm > 0.0;
  const bool above = settings.skip_above_norm > 0.0 && decision.norm > settings.skip_above_norm;
  decision.clip = clip_coefficient(decision.norm, settings.max_grad_norm);
  decision.gradient_scale = static_cast<float>(decision.clip * prepared.inverse_scale);
  decision.shrinks_scale = prepared.found_inf != 0 || (non_finite && skips_non_finite);
  decision.found_inf = decision.shrinks_scale || non_finite;
  decision.skip = decision.shrinks_scale || above;
  return decision;
}

/// Moves the scalars that all groups share.
STEPGRAPH_HOST_DEVICE void finish_step(const step_settings& settings, const prepared_step& prepared,
                                       const gradient_statistics& statistics,
                                       const step_decision& decision, step_scalars& scalars) {
  scalars.loss_scale = prepared.loss_scale;
  scalars.inverse_scale = static_cast<float>(prepared.inverse_scale);
  scalars.grad_norm = decision.norm;
  scalars.zeros = statistics.zeros;
  scalars.found_inf = decision.found_inf ? 1u : 0u;
  scalars.skip = decision.skip ? 1u : 0u;
  scalars.clip_coefficient = static_cast<float>(decision.clip);
  scalars.gradient_scale = decision.gradient_scale;
  scalars.next_loss_scale =
      updated_loss_scale(settings.scaling, scalars.next_loss_scale, decision.shrinks_scale);
  ++scalars.launches;
  if (decision.skip) {
    ++scalars.skipped;
  } else {
    ++scalars.step;
    scalars.samples += settings.samples_per_step;
  }
}

/// The terms of an update that is applied.
STEPGRAPH_HOST_DEVICE adam_terms finish_group(const prepared_group& prepared,
                                              float gradient_scale) {
  adam_terms terms = prepared.terms;
  terms.gradient_scale = terms.gradient_scale * gradient_scale;
  return terms;
}

}  // namespace stepgraph::math
