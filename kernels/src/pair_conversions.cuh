#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "stepgraph/math/fp8.hpp"
#include "stepgraph/math/rounding.hpp"

/// Conversions two elements at a time, as the device's instructions take them; the same bits as the
/// single ones of math::format_traits.
namespace stepgraph::cuda {

template <storage_format Format>
using storage_of = typename math::format_traits<Format>::storage;

template <storage_format Format>
__device__ __forceinline__ void decode_two(storage_of<Format> first, storage_of<Format> second,
                                           float& a, float& b) {
  using enum storage_format;
  if constexpr (Format == e4m3 || Format == e5m2) {
    const auto both = static_cast<__nv_fp8x2_storage_t>(first | second << 8);
    const __half2_raw halves =
        __nv_cvt_fp8x2_to_halfraw2(both, Format == e4m3 ? __NV_E4M3 : __NV_E5M2);
    const float2 values = __half22float2(__half2(halves));
    a = values.x;
    b = values.y;
  } else {
    a = math::format_traits<Format>::decode(first);
    b = math::format_traits<Format>::decode(second);
  }
}

template <storage_format Format>
__device__ __forceinline__ void encode_two(float a, float b, storage_of<Format>& first,
                                           storage_of<Format>& second) {
  using enum storage_format;
  if constexpr (Format == e4m3 || Format == e5m2) {
    const __nv_fp8x2_storage_t both = __nv_cvt_float2_to_fp8x2(
        make_float2(a, b), __NV_SATFINITE, Format == e4m3 ? __NV_E4M3 : __NV_E5M2);
    first = static_cast<std::uint8_t>(both & 0xffu);
    second = static_cast<std::uint8_t>(both >> 8);
  } else if constexpr (Format == bf16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    first = __bfloat16_as_ushort(both.x);
    second = __bfloat16_as_ushort(both.y);
  } else if constexpr (Format == f16) {
    const __half2 both = __floats2half2_rn(a, b);
    first = __half_as_ushort(both.x);
    second = __half_as_ushort(both.y);
  } else {
    first = math::format_traits<Format>::encode(a);
    second = math::format_traits<Format>::encode(b);
  }
}

}  // namespace stepgraph::cuda
