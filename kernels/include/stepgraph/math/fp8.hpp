#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

#include "stepgraph/math/rounding.hpp"

/// The 8-bit formats, rounding to nearest even and saturating: a value past the largest becomes the
/// largest, a NaN becomes 0x7f. The device uses its conversion instructions, the host integer
/// arithmetic that vectorizes; both give the same bits.
namespace stepgraph::math {

namespace detail {

/// f32 to an 8-bit format of `MantissaBits` and exponent bias `Bias` whose largest finite code is
/// `LargestCode`, on the host.
template <int MantissaBits, int Bias, std::uint32_t LargestCode>
inline __attribute__((always_inline)) std::uint8_t encode_fp8_on_host(float value) {
  constexpr int dropped = 23 - MantissaBits;
  constexpr std::uint32_t smallest_normal = static_cast<std::uint32_t>(127 - Bias + 1) << 23;
  // Adding a number whose last place is the smallest subnormal of the format makes the addition
  // itself round to nearest even.
  constexpr std::uint32_t aligner = static_cast<std::uint32_t>(127 + 1 - Bias - MantissaBits + 23)
                                    << 23;
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - (static_cast<std::uint32_t>(127 - Bias) << 23) +
                                ((1u << (dropped - 1)) - 1u) + ((magnitude >> dropped) & 1u)) >>
                               dropped;
  const std::uint32_t subnormal =
      float_bits(bits_to_float(magnitude) + bits_to_float(aligner)) - aligner;
  // Magnitudes far outside the format, on either side, must not wrap in `normal`.
  constexpr std::uint32_t past_largest = static_cast<std::uint32_t>(127 + 32) << 23;
  std::uint32_t code = magnitude < smallest_normal ? subnormal : normal;
  code = code > LargestCode || magnitude >= past_largest ? LargestCode : code;
  const std::uint32_t result = magnitude > 0x7f800000u ? 0x7fu : sign | code;
  return static_cast<std::uint8_t>(result);
}

}  // namespace detail

template <>
struct format_traits<storage_format::e4m3> {
  using storage = std::uint8_t;
  static STEPGRAPH_HOST_DEVICE float decode(storage stored) {
#if defined(__CUDA_ARCH__)
    const __half_raw half = __nv_cvt_fp8_to_halfraw(stored, __NV_E4M3);
    return __half2float(__half(half));
#else
    const std::uint32_t sign = (static_cast<std::uint32_t>(stored) & 0x80u) << 24;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(stored) & 0x7fu;
    const std::uint32_t scaled = float_bits(bits_to_float(magnitude << 20) * 0x1p120f);
    return bits_to_float(sign | (magnitude == 0x7fu ? 0x7fffffffu : scaled));
#endif
  }
  static STEPGRAPH_HOST_DEVICE storage encode(float value) {
#if defined(__CUDA_ARCH__)
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
#else
    return detail::encode_fp8_on_host<3, 7, 0x7e>(value);
#endif
  }
};

template <>
struct format_traits<storage_format::e5m2> {
  using storage = std::uint8_t;
  static STEPGRAPH_HOST_DEVICE float decode(storage stored) {
    return format_traits<storage_format::f16>::decode(
        static_cast<std::uint16_t>(static_cast<std::uint32_t>(stored) << 8));
  }
  static STEPGRAPH_HOST_DEVICE storage encode(float value) {
#if defined(__CUDA_ARCH__)
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
#else
    return detail::encode_fp8_on_host<2, 15, 0x7b>(value);
#endif
  }
};

}  // namespace stepgraph::math
