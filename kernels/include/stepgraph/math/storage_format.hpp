#pragma once

#include <cstddef>
#include <cstdint>

#include "stepgraph/math/portability.hpp"

namespace stepgraph {

/// How the elements of one operand are stored. Arithmetic is always f32.
enum class storage_format : std::uint8_t {
  none,  ///< the operand does not exist (an update without master weights)
  f32,   ///< IEEE binary32
  f16,   ///< IEEE binary16
  bf16,  ///< upper half of binary32, rounded to nearest even
};

/// Bytes of one element; 0 for `none`.
STEPGRAPH_HOST_DEVICE constexpr std::size_t element_size(storage_format format) {
  return format == storage_format::none ? 0 : format == storage_format::f32 ? 4 : 2;
}

/// The name used in signatures, messages and benchmark names: "none", "f32", "f16", "bf16".
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
  }
  return "unknown";
}

}  // namespace stepgraph
