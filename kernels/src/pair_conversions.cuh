#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "operand_access.cuh"
#include "stepgraph/math/fp8.hpp"
#include "stepgraph/math/rounding.hpp"

/// Conversions between stored bits and f32, two elements at a time where the device's instructions
/// take pairs; the same bits as the single conversions of math::format_traits.
namespace stepgraph::cuda {

/// A few elements in registers.
template <int Width>
struct float_pack {
  float value[Width];
};

/// The unsigned type of an element's bits.
template <storage_format Format>
using bits_of =
    std::conditional_t<element_size(Format) == 4, std::uint32_t,
                       std::conditional_t<element_size(Format) == 2, std::uint16_t, std::uint8_t>>;

template <storage_format Format, int Width>
__device__ __forceinline__ float_pack<Width> decode_pack(const stored_bits<Width>& bits) {
  using enum storage_format;
  static_assert(Width % 2 == 0);
  float_pack<Width> pack;
#pragma unroll
  for (int i = 0; i < Width; i += 2) {
    float2 two;
    if constexpr (Format == f32) {
      two = make_float2(__uint_as_float(bits.word[i]), __uint_as_float(bits.word[i + 1]));
    } else if constexpr (Format == f16) {
      __half2_raw halves;
      halves.x = element_of<std::uint16_t>(bits, i);
      halves.y = element_of<std::uint16_t>(bits, i + 1);
      two = __half22float2(__half2(halves));
    } else if constexpr (Format == bf16) {
      const std::uint32_t word = bits.word[i / 2];
      two = make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    } else {
      const auto both = element_of<std::uint16_t>(bits, i / 2);
      two = __half22float2(
          __half2(__nv_cvt_fp8x2_to_halfraw2(both, Format == e4m3 ? __NV_E4M3 : __NV_E5M2)));
    }
    pack.value[i] = two.x;
    pack.value[i + 1] = two.y;
  }
  return pack;
}

template <storage_format Format, int Width>
__device__ __forceinline__ stored_bits<Width> encode_pack(const float_pack<Width>& pack) {
  using enum storage_format;
  static_assert(Width % 2 == 0);
  stored_bits<Width> bits;
#pragma unroll
  for (int i = 0; i < Width; i += 2) {
    const float a = pack.value[i];
    const float b = pack.value[i + 1];
    if constexpr (Format == f32) {
      bits.word[i] = __float_as_uint(a);
      bits.word[i + 1] = __float_as_uint(b);
    } else if constexpr (Format == f16) {
      const __half2 both = __floats2half2_rn(a, b);
      bits.word[i / 2] =
          static_cast<std::uint32_t>(__half_as_ushort(both.y)) << 16 | __half_as_ushort(both.x);
    } else if constexpr (Format == bf16) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
      bits.word[i / 2] = static_cast<std::uint32_t>(__bfloat16_as_ushort(both.y)) << 16 |
                         __bfloat16_as_ushort(both.x);
    } else {
      set_element<std::uint16_t>(bits, i / 2,
                                 __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE,
                                                          Format == e4m3 ? __NV_E4M3 : __NV_E5M2));
    }
  }
  return bits;
}

}  // namespace stepgraph::cuda
