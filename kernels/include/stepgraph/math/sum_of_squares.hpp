#pragma once

#include "stepgraph/math/portability.hpp"

namespace stepgraph::math {

/// A sum of squares of f32 values in f32 that neither overflows nor vanishes: large and tiny
/// values are scaled by a power of two and summed apart (Blue 1978).
struct scaled_sum {
  float small = 0.0f;   ///< sum of (x * 2^80)^2   over        |x| < 2^-40
  float medium = 0.0f;  ///< sum of x^2            over 2^-40 <= |x| < 2^40
  float large = 0.0f;   ///< sum of (x * 2^-80)^2  over 2^40  <= |x|
};

/// Adds x^2.
STEPGRAPH_HOST_DEVICE void add_square(scaled_sum& sum, float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float tiny = magnitude < 0x1p-40f ? x * 0x1p80f : 0.0f;
  const float huge = magnitude >= 0x1p40f ? x * 0x1p-80f : 0.0f;
  const float middle = magnitude >= 0x1p-40f ? (magnitude < 0x1p40f ? x : 0.0f) : 0.0f;
  sum.small = fused_multiply_add(tiny, tiny, sum.small);
  sum.medium = fused_multiply_add(middle, middle, sum.medium);
  sum.large = fused_multiply_add(huge, huge, sum.large);
}

STEPGRAPH_HOST_DEVICE scaled_sum operator+(const scaled_sum& a, const scaled_sum& b) {
  return {a.small + b.small, a.medium + b.medium, a.large + b.large};
}

/// The sum of squares in double.
STEPGRAPH_HOST_DEVICE double total(const scaled_sum& sum) {
  return static_cast<double>(sum.medium) +
         (static_cast<double>(sum.large) * 0x1p160 + static_cast<double>(sum.small) * 0x1p-160);
}

/// False for infinities and NaN.
STEPGRAPH_HOST_DEVICE bool is_finite(float x) { return (x < 0.0f ? -x : x) <= 3.402823466e+38f; }

}  // namespace stepgraph::math
