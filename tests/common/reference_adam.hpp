#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace stepgraph::test {

/// What one group's step is asked to do.
struct reference_options {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = true;
  bool bias_correction = true;
  bool maximize = false;
  double gradient_factor = 1.0;  ///< inverse loss scale * clip coefficient
  std::uint64_t step = 1;        ///< applied updates, this one included
};

struct reference_element {
  double parameter = 0.0;
  double exp_avg = 0.0;
  double exp_avg_sq = 0.0;
};

inline double reference_correction(const reference_options& options, double beta) {
  return options.bias_correction ? 1.0 - std::pow(beta, static_cast<double>(options.step)) : 1.0;
}

/// One element of Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019) in float64,
/// written as the papers write it.
inline reference_element reference_step(const reference_options& options, double gradient,
                                        reference_element element) {
  double g = gradient * options.gradient_factor * (options.maximize ? -1.0 : 1.0);
  if (!options.decoupled) g += options.weight_decay * element.parameter;
  element.exp_avg = options.beta1 * element.exp_avg + (1.0 - options.beta1) * g;
  element.exp_avg_sq = options.beta2 * element.exp_avg_sq + (1.0 - options.beta2) * g * g;
  if (options.decoupled) {
    element.parameter -= options.learning_rate * options.weight_decay * element.parameter;
  }
  const double exp_avg_hat = element.exp_avg / reference_correction(options, options.beta1);
  const double exp_avg_sq_hat = element.exp_avg_sq / reference_correction(options, options.beta2);
  element.parameter -=
      options.learning_rate * exp_avg_hat / (std::sqrt(exp_avg_sq_hat) + options.eps);
  return element;
}

/// How far an evaluation in f32 may be from `reference_step(options, gradient, before)`: the
/// roundings of `math::adam_update` and of its terms, propagated. Relative to the
/// size of the update, not of the parameter, except for the last rounding of the parameter.
inline reference_element reference_error_bound(const reference_options& options, double gradient,
                                               const reference_element& before) {
  constexpr double u = 0x1p-24;  // half a unit in the last place of f32
  const reference_element after = reference_step(options, gradient, before);
  const double decay = options.weight_decay * std::abs(before.parameter);
  // Sizes before any cancellation.
  const double g = std::abs(gradient) * options.gradient_factor + (options.decoupled ? 0.0 : decay);
  const double moment1 = options.beta1 * std::abs(before.exp_avg) + (1.0 - options.beta1) * g;
  const double moment2 = options.beta2 * before.exp_avg_sq + (1.0 - options.beta2) * g * g;

  reference_element bound;
  bound.exp_avg = 6.0 * u * moment1 + 0x1p-148;
  bound.exp_avg_sq = 10.0 * u * moment2 + 0x1p-148;

  const double step_size = options.learning_rate / reference_correction(options, options.beta1);
  const double inverse_sqrt = 1.0 / std::sqrt(reference_correction(options, options.beta2));
  const double root = std::sqrt(after.exp_avg_sq);
  const double root_error = std::min(std::sqrt(bound.exp_avg_sq), bound.exp_avg_sq / (2.0 * root));
  const double denominator = root * inverse_sqrt + options.eps;
  const double denominator_error = root_error * inverse_sqrt + 4.0 * u * denominator;
  const double least_denominator =
      std::max(denominator - denominator_error, (1.0 - 4.0 * u) * options.eps);
  const double quotient = std::abs(after.exp_avg) / denominator;
  const double change_error =
      step_size * ((bound.exp_avg + quotient * denominator_error) / least_denominator +
                   4.0 * u * quotient) +
      (options.decoupled ? 4.0 * u * options.learning_rate * decay : 0.0);
  bound.parameter = change_error + u * std::abs(after.parameter) + 0x1p-148;
  return bound;
}

}  // namespace stepgraph::test
