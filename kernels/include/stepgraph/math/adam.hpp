#pragma once

#include "stepgraph/math/portability.hpp"
#include "stepgraph/math/restricted.hpp"

namespace stepgraph::math {

/// What the update of one parameter group needs at one step, computed by `advance_step` in double
/// and rounded once. Two 16-byte loads a thread block.
///
/// AdamW and L2 mode, bias correction on and off, maximize, unscaling and clipping are all values
/// of these terms: the element math has no branch.
struct alignas(16) adam_terms {
  float gradient_scale;       ///< inverse loss scale * clip coefficient, negative to maximize
  float one_minus_beta1;      ///< 1 - beta1
  float one_minus_beta2;      ///< 1 - beta2
  float step_size;            ///< learning rate / (1 - beta1^t)
  float inverse_sqrt_bias2;   ///< 1 / sqrt(1 - beta2^t)
  float eps;                  ///< added to the denominator
  float l2_weight_decay;      ///< weight decay in L2 mode, else 0
  float decoupled_shrinkage;  ///< learning rate * weight decay in AdamW mode, else 0
};

/// The squared gradient saturates here, so that a second moment can never become infinite and
/// poison later steps with inf - inf.
inline constexpr float largest_square = 3.402823466e+38f;

/// The square root of a second moment, taken as at least 2^-101: the denominator of an update is
/// never zero, whatever eps. Gradients that matter are far above (2^-50.5 is 6e-16).
STEPGRAPH_HOST_DEVICE float bounded_root(float second_moment) {
  return restricted_square_root(
      second_moment > smallest_restricted_square ? second_moment : smallest_restricted_square);
}

/// One element of one Adam or AdamW step (Kingma and Ba 2015; Loshchilov and Hutter 2019).
///
/// With g = gradient * gradient_scale (+ l2_weight_decay * parameter):
///   exp_avg    = exp_avg    - (1 - beta1) * exp_avg    + (1 - beta1) * g
///   exp_avg_sq = exp_avg_sq - (1 - beta2) * exp_avg_sq + (1 - beta2) * g^2
///   parameter  -= step_size * exp_avg / (sqrt(exp_avg_sq) * inverse_sqrt_bias2 + eps)
///                 + decoupled_shrinkage * parameter
/// The moments use 1 - beta because it keeps its relative accuracy in f32 while beta does not
/// (0.999f is off by 1.3e-8, which is 1.3e-5 of 1 - beta2); the old moment fades before the new
/// gradient joins, so that nothing cancels when beta is small. Both parts of the parameter's change
/// are added before the one subtraction that rounds at the parameter's size.
/// With AMSGrad (`with_maximum`, the same for all elements), the denominator uses the largest
/// second moment so far, which `max_exp_avg_sq` keeps (Reddi et al. 2018; not bias-corrected, as in
/// PyTorch).
STEPGRAPH_HOST_DEVICE void adam_update(const adam_terms& terms, bool with_maximum, float gradient,
                                       float& parameter, float& exp_avg, float& exp_avg_sq,
                                       float& max_exp_avg_sq) {
  const float g =
      fused_multiply_add(terms.l2_weight_decay, parameter, gradient * terms.gradient_scale);
  const float square = g * g;
  const float bounded_square = square < largest_square ? square : largest_square;
  exp_avg = fused_multiply_add(terms.one_minus_beta1, g,
                               fused_multiply_add(-terms.one_minus_beta1, exp_avg, exp_avg));
  exp_avg_sq =
      fused_multiply_add(terms.one_minus_beta2, bounded_square,
                         fused_multiply_add(-terms.one_minus_beta2, exp_avg_sq, exp_avg_sq));
  if (with_maximum) max_exp_avg_sq = exp_avg_sq > max_exp_avg_sq ? exp_avg_sq : max_exp_avg_sq;
  const float second_moment = with_maximum ? max_exp_avg_sq : exp_avg_sq;
  // At least 2^-50.5, at most 2^64 * 2^27: what the restricted reciprocal takes.
  const float denominator =
      fused_multiply_add(bounded_root(second_moment), terms.inverse_sqrt_bias2, terms.eps);
  const float change =
      fused_multiply_add(terms.step_size, exp_avg * restricted_reciprocal(denominator),
                         terms.decoupled_shrinkage * parameter);
  parameter = parameter - change;
}

}  // namespace stepgraph::math
