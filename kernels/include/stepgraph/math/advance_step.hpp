#pragma once

#include "stepgraph/math/adam.hpp"
#include "stepgraph/math/bias_correction.hpp"
#include "stepgraph/math/clip.hpp"
#include "stepgraph/math/step_scalars.hpp"

/// The arithmetic of the `advance_step` node: the one writer of the step scalars.
namespace stepgraph::math {

/// Applies one setting of a group.
STEPGRAPH_HOST_DEVICE void apply_setting(group_settings& settings, group_progress& progress,
                                         setting_field field, double value) {
  switch (field) {
    case setting_field::learning_rate:
      settings.learning_rate = value;
      settings.flags |= group_learning_rate_by_hand;
      break;
    case setting_field::resume_schedule:
      settings.flags &= ~static_cast<std::uint32_t>(group_learning_rate_by_hand);
      break;
    case setting_field::weight_decay:
      settings.weight_decay = value;
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
      settings.loss_scale = value;
      break;
    case setting_field::max_grad_norm:
      settings.max_grad_norm = value;
      break;
    case setting_field::step:
      scalars.step = static_cast<std::uint64_t>(value);
      break;
    default:
      break;
  }
}

/// Decides whether the step is skipped and derives the scalars that all groups share.
STEPGRAPH_HOST_DEVICE void advance_scalars(const step_settings& settings,
                                           const gradient_statistics& statistics,
                                           step_scalars& scalars) {
  const double inverse_scale = 1.0 / settings.loss_scale;
  const double norm = statistics.non_finite
                          ? __builtin_inf()
                          : square_root(statistics.sum_of_squares) * inverse_scale;
  scalars.loss_scale = static_cast<float>(settings.loss_scale);
  scalars.inverse_scale = static_cast<float>(inverse_scale);
  scalars.grad_norm = norm;
  scalars.found_inf = statistics.non_finite;
  scalars.skip = statistics.non_finite;
  scalars.clip_coefficient = static_cast<float>(
      statistics.measured ? clip_coefficient(norm, settings.max_grad_norm) : 1.0);
  if (scalars.skip) {
    ++scalars.skipped;
  } else {
    ++scalars.step;
  }
}

/// Advances one group by one applied update and returns the terms of that update. Called only
/// when the step is not skipped, after `advance_scalars`.
STEPGRAPH_HOST_DEVICE adam_terms advance_group(const group_settings& settings,
                                               const step_settings& step,
                                               const step_scalars& scalars,
                                               group_progress& progress) {
  const bool scheduled =
      settings.has_schedule != 0 && (settings.flags & group_learning_rate_by_hand) == 0;
  const double learning_rate =
      scheduled ? learning_rate_at(settings.schedule, progress.step) : settings.learning_rate;
  ++progress.step;
  progress.learning_rate = learning_rate;

  const bool corrected = (settings.flags & group_bias_correction) != 0;
  const double correction1 = corrected ? bias_correction(settings.beta1, progress.step) : 1.0;
  const double correction2 = corrected ? bias_correction(settings.beta2, progress.step) : 1.0;
  const bool decoupled = (settings.flags & group_decoupled_weight_decay) != 0;
  const double sign = (settings.flags & group_maximize) != 0 ? -1.0 : 1.0;
  const double clip = static_cast<double>(scalars.clip_coefficient);

  adam_terms terms;
  terms.gradient_scale = static_cast<float>(sign * clip / step.loss_scale);
  terms.one_minus_beta1 = static_cast<float>(1.0 - settings.beta1);
  terms.one_minus_beta2 = static_cast<float>(1.0 - settings.beta2);
  terms.step_size = static_cast<float>(learning_rate / correction1);
  terms.inverse_sqrt_bias2 = static_cast<float>(1.0 / square_root(correction2));
  terms.eps = static_cast<float>(settings.eps);
  terms.l2_weight_decay = static_cast<float>(decoupled ? 0.0 : settings.weight_decay);
  terms.decoupled_shrinkage =
      static_cast<float>(decoupled ? learning_rate * settings.weight_decay : 0.0);
  return terms;
}

}  // namespace stepgraph::math
