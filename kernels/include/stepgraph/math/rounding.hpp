#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "stepgraph/math/portability.hpp"
#include "stepgraph/math/storage_format.hpp"

/// Conversions between f32 and the narrow storage formats, rounding to nearest even.
///
/// The device uses its conversion instructions, the host integer arithmetic that vectorizes. Both
/// give the same bits for every input; a NaN becomes the canonical NaN 0x7fff of the format.
namespace stepgraph::math {

STEPGRAPH_HOST_DEVICE std::uint32_t float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(std::uint32_t, value);
#endif
}

STEPGRAPH_HOST_DEVICE float bits_to_float(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

/// Encodes to and decodes from one storage format. `storage` is the type of an element in memory.
template <storage_format Format>
struct format_traits;

template <>
struct format_traits<storage_format::f32> {
  using storage = float;
  static STEPGRAPH_HOST_DEVICE float decode(storage stored) { return stored; }
  static STEPGRAPH_HOST_DEVICE storage encode(float value) { return value; }
};

template <>
struct format_traits<storage_format::bf16> {
  using storage = std::uint16_t;
  static STEPGRAPH_HOST_DEVICE float decode(storage stored) {
    return bits_to_float(static_cast<std::uint32_t>(stored) << 16);
  }
  static STEPGRAPH_HOST_DEVICE storage encode(float value) {
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const std::uint32_t bits = float_bits(value);
    // Adding half a unit in the last kept place, less one when that place is even, makes the
    // carry do the rounding; it also turns a too large value into infinity, as IEEE asks.
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<storage>(is_nan ? 0x7fffu : rounded);
#endif
  }
};

template <>
struct format_traits<storage_format::f16> {
  using storage = std::uint16_t;
  static STEPGRAPH_HOST_DEVICE float decode(storage stored) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(stored));
#else
    const std::uint32_t sign = (static_cast<std::uint32_t>(stored) & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(stored) & 0x7fffu;
    // Exponent and mantissa moved to their binary32 places name the value times 2^-112; one exact
    // multiplication repairs the exponent, subnormals included. Infinity and NaN need the rest.
    const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;
    const std::uint32_t special = 0x7f800000u | (magnitude << 13);
    const std::uint32_t result = magnitude >= 0x7c00u ? special : float_bits(scaled);
    return bits_to_float(sign | result);
#endif
  }
  static STEPGRAPH_HOST_DEVICE storage encode(float value) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(value));
#else
    const std::uint32_t bits = float_bits(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    // Normal results: rebias the exponent and let the carry round, as in bf16.
    const std::uint32_t normal =
        (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal results: adding 0.5 aligns the last place of binary16 (2^-24) with the last place
    // of the sum, so that the addition itself rounds to nearest even.
    const std::uint32_t subnormal = float_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
    std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;                 // rounds past 65504
    if (magnitude > 0x7f800000u) return 0x7fffu;
    return static_cast<storage>(sign | result);
#endif
  }
};

}  // namespace stepgraph::math
