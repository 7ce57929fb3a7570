#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "stepgraph/math/fp8.hpp"
#include "stepgraph/math/rounding.hpp"

/// Random operands, the same on the host and on a device: a hash of the element's index, encoded by
/// the library's own conversions.
namespace stepgraph::perf {

/// A well mixed 64-bit hash of a counter (the finaliser of splitmix64, Steele et al. 2014).
STEPGRAPH_HOST_DEVICE std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// What an operand is filled with: uniform in [low, high). A remainder has no value of its own and
/// gets random bits.
struct random_range {
  float low = 0.0f;
  float high = 1.0f;
  std::uint64_t seed = 0;
};

/// How elements of a format are stored.
template <storage_format Format>
struct stored_element {
  using type = typename math::format_traits<Format>::storage;
};
template <>
struct stored_element<storage_format::remainder> {
  using type = std::uint16_t;
};

/// Element number `index` of an operand.
template <storage_format Format>
STEPGRAPH_HOST_DEVICE typename stored_element<Format>::type random_element(
    const random_range& range, std::uint64_t index) {
  const std::uint64_t hash = mixed((range.seed << 48) ^ index);
  if constexpr (Format == storage_format::remainder) {
    return static_cast<std::uint16_t>(hash >> 48);
  } else {
    const float unit = static_cast<float>(hash >> 40) * 0x1p-24f;
    return math::format_traits<Format>::encode(range.low + (range.high - range.low) * unit);
  }
}

/// Calls `body` with the format as a compile-time constant. Throws for `none`.
template <class Body>
void with_format(storage_format format, Body&& body) {
  switch (format) {
    case storage_format::f32:
      return body(std::integral_constant<storage_format, storage_format::f32>());
    case storage_format::f16:
      return body(std::integral_constant<storage_format, storage_format::f16>());
    case storage_format::bf16:
      return body(std::integral_constant<storage_format, storage_format::bf16>());
    case storage_format::e4m3:
      return body(std::integral_constant<storage_format, storage_format::e4m3>());
    case storage_format::e5m2:
      return body(std::integral_constant<storage_format, storage_format::e5m2>());
    case storage_format::remainder:
      return body(std::integral_constant<storage_format, storage_format::remainder>());
    case storage_format::none:
      break;
  }
  throw std::invalid_argument("an operand of format none has no elements");
}

}  // namespace stepgraph::perf
