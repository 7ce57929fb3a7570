#pragma once

#include <cstddef>
#include <cstdint>

#include "stepgraph/math/portability.hpp"

namespace stepgraph {

/// How the elements of one operand are stored. Arithmetic is always f32.
///
/// What a narrow format means depends on the operand, see docs/numerics.md:
///   parameter, gradient   f16 and bf16 are plain; e4m3 and e5m2 parameters carry one f32 scale
///   master                f16 is block-scaled; `remainder` completes a bf16 parameter to f32
///   moments               f16 and e4m3 are block-scaled, bf16 is plain
enum class storage_format : std::uint8_t {
  none,       ///< the operand does not exist (an update without master weights)
  f32,        ///< IEEE binary32
  f16,        ///< IEEE binary16
  bf16,       ///< upper half of binary32, rounded to nearest even
  e4m3,       ///< 8 bits, 4 of them exponent; largest 448, no infinity (OCP FP8)
  e5m2,       ///< 8 bits, 5 of them exponent; largest 57344 (OCP FP8)
  remainder,  ///< int16: the lower half of an f32 whose rounded upper half is a bf16 parameter
};

/// Bytes of one element; 0 for `none`.
STEPGRAPH_HOST_DEVICE constexpr std::size_t element_size(storage_format format) {
  switch (format) {
    case storage_format::none:
      return 0;
    case storage_format::f32:
      return 4;
    case storage_format::f16:
    case storage_format::bf16:
    case storage_format::remainder:
      return 2;
    case storage_format::e4m3:
    case storage_format::e5m2:
      return 1;
  }
  return 0;
}

/// The name used in signatures, messages and benchmark names.
constexpr const char* name_of(storage_format format) {
  switch (format) {
    case storage_format::none:
      return "none";
    case storage_format::f32:
      return "f32";
    case storage_format::f16:
      return "f16";
    case storage_format::bf16:
      return "bf16";
    case storage_format::e4m3:
      return "e4m3";
    case storage_format::e5m2:
      return "e5m2";
    case storage_format::remainder:
      return "remainder";
  }
  return "unknown";
}

/// Elements that share one scale in a block-scaled operand.
inline constexpr std::uint32_t scale_block_elements = 128;

/// True if a master or moment of this format is block-scaled.
STEPGRAPH_HOST_DEVICE constexpr bool is_block_scaled(storage_format format) {
  return format == storage_format::f16 || format == storage_format::e4m3;
}

/// True for the formats that carry one scale a tensor as parameters.
STEPGRAPH_HOST_DEVICE constexpr bool is_fp8(storage_format format) {
  return format == storage_format::e4m3 || format == storage_format::e5m2;
}

/// Scales of a block-scaled operand of `numel` elements, one byte each.
constexpr std::uint64_t scale_count(std::uint64_t numel) {
  return (numel + scale_block_elements - 1) / scale_block_elements;
}

}  // namespace stepgraph
