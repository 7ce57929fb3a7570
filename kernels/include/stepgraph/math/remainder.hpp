#pragma once

#include <cstdint>

#include "stepgraph/math/rounding.hpp"

/// An f32 master in two pieces: a bf16 parameter and an int16 remainder (the layout of Transformer
/// Engine's parameter remainders).
///
/// The bits of the f32 are parameter * 2^16 + remainder, the remainder signed, so the parameter is
/// the master rounded to nearest (ties away from zero) and the pair is lossless for every f32
/// whatsoever.
namespace stepgraph::math {

STEPGRAPH_HOST_DEVICE float join_remainder(std::uint16_t parameter, std::uint16_t remainder) {
  const std::uint32_t low =
      static_cast<std::uint32_t>(static_cast<std::int32_t>(static_cast<std::int16_t>(remainder)));
  return bits_to_float((static_cast<std::uint32_t>(parameter) << 16) + low);
}

/// The bf16 parameter of a master.
STEPGRAPH_HOST_DEVICE std::uint16_t rounded_parameter(float master) {
  return static_cast<std::uint16_t>((float_bits(master) + 0x8000u) >> 16);
}

/// The remainder of a master: its lower half.
STEPGRAPH_HOST_DEVICE std::uint16_t remainder_of(float master) {
  return static_cast<std::uint16_t>(float_bits(master) & 0xffffu);
}

}  // namespace stepgraph::math
