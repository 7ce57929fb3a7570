#pragma once

#include <cstdint>

#include "stepgraph/math/portability.hpp"

/// Words that say by themselves whether they have arrived: 8 bytes, stored and loaded as one, of
/// which 4 are the value and 4 say of which launch it is. A reader that finds the tag in every word
/// of a message has the message, in whatever order its words came, so the writer needs no fence.
namespace stepgraph {

/// The tag of what launch number `launch` writes. 2^32 launches later it comes again.
STEPGRAPH_HOST_DEVICE constexpr std::uint32_t tag_of_launch(std::uint64_t launch) {
  return static_cast<std::uint32_t>(launch);
}

STEPGRAPH_HOST_DEVICE constexpr std::uint64_t tagged_word(std::uint32_t tag, std::uint32_t value) {
  return static_cast<std::uint64_t>(tag) << 32 | value;
}

STEPGRAPH_HOST_DEVICE constexpr std::uint32_t tag_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}

STEPGRAPH_HOST_DEVICE constexpr std::uint32_t value_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word);
}

}  // namespace stepgraph
