#pragma once

#include "stepgraph/math/portability.hpp"

/// IEEE square root and reciprocal on part of their domain, where the device needs neither a range
/// check nor a slow path: an approximation and one Newton step with fused multiply-adds round
/// correctly there (tests compare every mantissa with the host's IEEE operations). An update does
/// both for every element, and with the checks they are most of its instructions.
namespace stepgraph::math {

/// The smallest argument of `restricted_square_root`, 2^-101.
inline constexpr float smallest_restricted_square = 0x1p-101f;

/// sqrt(x) rounded to nearest, for finite x of at least 2^-101.
STEPGRAPH_HOST_DEVICE float restricted_square_root(float x) {
#if defined(__CUDA_ARCH__)
  float inverse_root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse_root) : "f"(x));
  const float root = x * inverse_root;
  const float residual = __fmaf_rn(-root, root, x);
  return __fmaf_rn(residual, 0.5f * inverse_root, root);
#else
  return __builtin_sqrtf(x);
#endif
}

/// 1 / x rounded to nearest, for x in [2^-100, 2^100].
STEPGRAPH_HOST_DEVICE float restricted_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  const float residual = __fmaf_rn(-x, inverse, 1.0f);
  return __fmaf_rn(inverse, residual, inverse);
#else
  return 1.0f / x;
#endif
}

}  // namespace stepgraph::math
