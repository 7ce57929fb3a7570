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
  bool amsgrad = false;
  double gradient_factor = 1.0;  ///< inverse loss scale * clip coefficient
  std::uint64_t step = 1;        ///< applied updates, this one included
};

struct reference_element {
  double parameter = 0.0;
  double exp_avg = 0.0;
  double exp_avg_sq = 0.0;
  double max_exp_avg_sq = 0.0;
};

/// One step of one group in float64, written as the papers write it: Adam (Kingma and Ba 2015),
/// AdamW (Loshchilov and Hutter 2019), AMSGrad (Reddi et al. 2018).
class reference_adam {
 public:
  explicit reference_adam(const reference_options& options)
      : options_(options),
        correction1_(correction(options.beta1)),
        correction2_(correction(options.beta2)) {}

  reference_element step(double gradient, reference_element element) const {
    double g = gradient * options_.gradient_factor * (options_.maximize ? -1.0 : 1.0);
    if (!options_.decoupled) g += options_.weight_decay * element.parameter;
    element.exp_avg = options_.beta1 * element.exp_avg + (1.0 - options_.beta1) * g;
    element.exp_avg_sq = options_.beta2 * element.exp_avg_sq + (1.0 - options_.beta2) * g * g;
    element.max_exp_avg_sq = std::max(element.max_exp_avg_sq, element.exp_avg_sq);
    if (options_.decoupled) {
      element.parameter -= options_.learning_rate * options_.weight_decay * element.parameter;
    }
    const double exp_avg_hat = element.exp_avg / correction1_;
    const double exp_avg_sq_hat = second_moment(element) / correction2_;
    element.parameter -=
        options_.learning_rate * exp_avg_hat / (std::sqrt(exp_avg_sq_hat) + options_.eps);
    return element;
  }

  /// How far an evaluation in f32 may be from `after`, the step from `before`: the roundings of
  /// `math::adam_update` and of its terms, propagated. Relative to the size of the update, not of
  /// the parameter, except for the last rounding of the parameter.
  reference_element error_bound(double gradient, const reference_element& before,
                                const reference_element& after) const {
    constexpr double u = 0x1p-24;  // half a unit in the last place of f32
    const double decay = options_.weight_decay * std::abs(before.parameter);
    // Sizes before any cancellation.
    const double g =
        std::abs(gradient) * options_.gradient_factor + (options_.decoupled ? 0.0 : decay);
    const double moment1 = options_.beta1 * std::abs(before.exp_avg) + (1.0 - options_.beta1) * g;
    const double moment2 = options_.beta2 * before.exp_avg_sq + (1.0 - options_.beta2) * g * g;

    reference_element bound;
    bound.exp_avg = moment1 == 0.0 ? 0.0 : 6.0 * u * moment1 + 0x1p-148;
    bound.exp_avg_sq = moment2 == 0.0 ? 0.0 : 10.0 * u * moment2 + 0x1p-148;
    bound.max_exp_avg_sq =
        after.exp_avg_sq + bound.exp_avg_sq > before.max_exp_avg_sq ? bound.exp_avg_sq : 0.0;

    const double step_size = options_.learning_rate / correction1_;
    const double inverse_sqrt = 1.0 / std::sqrt(correction2_);
    const double root = std::sqrt(second_moment(after));
    const double moment_error = options_.amsgrad ? bound.max_exp_avg_sq : bound.exp_avg_sq;
    // Roots count as at least 2^-50.5.
    const double root_error = root == 0.0
                                  ? 0x1p-50
                                  : std::min(std::sqrt(moment_error), moment_error / (2.0 * root)) +
                                        (root < 0x1p-50 ? 0x1p-50 : 0.0);
    const double denominator = root * inverse_sqrt + options_.eps;
    const double denominator_error = root_error * inverse_sqrt + 4.0 * u * denominator;
    const double least_denominator =
        std::max(denominator - denominator_error, (1.0 - 4.0 * u) * options_.eps);
    const double quotient = std::abs(after.exp_avg) / denominator;
    const double change_error =
        step_size * ((bound.exp_avg + quotient * denominator_error) / least_denominator +
                     4.0 * u * quotient) +
        (options_.decoupled ? 4.0 * u * options_.learning_rate * decay : 0.0);
    bound.parameter = change_error + u * std::abs(after.parameter) + 0x1p-148;
    return bound;
  }

 private:
  double correction(double beta) const {
    return options_.bias_correction ? 1.0 - std::pow(beta, static_cast<double>(options_.step))
                                    : 1.0;
  }
  double second_moment(const reference_element& element) const {
    return options_.amsgrad ? element.max_exp_avg_sq : element.exp_avg_sq;
  }

  reference_options options_;
  double correction1_;
  double correction2_;
};

}  // namespace stepgraph::test
