#pragma once

#include <cstdint>

#include "stepgraph/math/portability.hpp"
#include "stepgraph/math/rounding.hpp"

/// The norm of a gradient, element by element. Sums are in double, whose range holds the square of
/// every f32: nothing overflows (gradients of 1e20) or vanishes (1e-25), and a total is not finite
/// exactly if an element is not.
namespace stepgraph::math {

/// Adds x^2.
STEPGRAPH_HOST_DEVICE void add_square(double& sum, float x) {
  const double wide = static_cast<double>(x);
  sum = fused_multiply_add(wide, wide, sum);
}

/// The bits of |x|. As integers they are ordered as the magnitudes, infinity above all numbers and
/// NaN above infinity.
STEPGRAPH_HOST_DEVICE std::uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

/// The larger of two totals of an infinity norm; NaN counts as the largest.
STEPGRAPH_HOST_DEVICE double larger_total(double a, double b) { return b > a || b != b ? b : a; }

/// False for infinities and NaN.
STEPGRAPH_HOST_DEVICE bool is_finite(double x) {
  return (x < 0.0 ? -x : x) <= 1.7976931348623157e+308;
}

}  // namespace stepgraph::math
