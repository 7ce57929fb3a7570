#pragma once

#include <cstdint>

#include "stepgraph/math/adam.hpp"
#include "stepgraph/math/fp8.hpp"

/// Block scaling of masters and moments in f16 and e4m3.
///
/// 128 consecutive elements share one scale, a power of two stored as its biased exponent (E8M0,
/// as in the OCP microscaling formats). It is the smallest power of two for which the largest
/// magnitude of the block still fits the format, so scaling never rounds and never overflows.
///
/// Second moments are stored as square roots (adam.hpp's bounded_root): that halves the exponent
/// range that 128 neighbours must share. A root that is not zero is never stored as zero, since the
/// denominator of an update would then be eps alone; a root that is zero stays zero.
namespace stepgraph::math {

/// What the scale rule needs to know of a format: the exponent and mantissa of its largest value,
/// and its smallest value above zero.
template <storage_format Format>
struct block_format;
template <>
struct block_format<storage_format::e4m3> {
  static constexpr std::uint32_t largest_exponent = 8;          // 448 = 1.75 * 2^8
  static constexpr std::uint32_t largest_mantissa = 0x600000u;  // of 1.75 in f32
  static constexpr float smallest = 0x1p-9f;
};
template <>
struct block_format<storage_format::f16> {
  static constexpr std::uint32_t largest_exponent = 15;         // 65504 = 1.9990234375 * 2^15
  static constexpr std::uint32_t largest_mantissa = 0x7fe000u;  // of 1.9990234375 in f32
  static constexpr float smallest = 0x1p-24f;
};

/// The larger of a magnitude and |x|; a NaN in x is passed over.
STEPGRAPH_HOST_DEVICE float larger_magnitude(float magnitude, float x) {
#if defined(__CUDA_ARCH__)
  return fmaxf(magnitude, fabsf(x));
#else
  const float candidate = __builtin_fabsf(x);
  return candidate > magnitude ? candidate : magnitude;
#endif
}

/// The stored scale for a block whose largest magnitude has the f32 bits `largest`. Kept within
/// [1, 253], so that the scale and its inverse are normal f32.
template <storage_format Format>
STEPGRAPH_HOST_DEVICE std::uint32_t block_scale_of(std::uint32_t largest) {
  using format = block_format<Format>;
  const std::uint32_t exponent = largest >> 23;
  const std::uint32_t mantissa = largest & 0x7fffffu;
  const std::uint32_t raised = exponent + (mantissa > format::largest_mantissa ? 1u : 0u);
  const std::uint32_t scale =
      raised > format::largest_exponent ? raised - format::largest_exponent : 1u;
  return scale < 253u ? (scale > 1u ? scale : 1u) : 253u;
}

/// 2^(stored - 127): multiplies what is decoded.
STEPGRAPH_HOST_DEVICE float block_factor(std::uint32_t stored) {
  return bits_to_float(stored << 23);
}

/// 2^(127 - stored): multiplies what is encoded.
STEPGRAPH_HOST_DEVICE float inverse_block_factor(std::uint32_t stored) {
  return bits_to_float((254u - stored) << 23);
}

/// What is stored, before scaling, of a second moment.
STEPGRAPH_HOST_DEVICE float stored_root(float second_moment) {
  return second_moment > 0.0f ? bounded_root(second_moment) : 0.0f;
}

/// A stored root times a factor, kept at the smallest magnitude of the format or above unless it is
/// zero, so that encoding it gives zero for zero only.
template <storage_format Format>
STEPGRAPH_HOST_DEVICE float scaled_root(float root, float factor) {
  constexpr float smallest = block_format<Format>::smallest;
  const float scaled = root * factor;
  const float bounded = scaled > smallest ? scaled : smallest;
  return root > 0.0f ? bounded : 0.0f;
}

}  // namespace stepgraph::math
