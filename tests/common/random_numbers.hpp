#pragma once

#include <bit>
#include <cstdint>

namespace stepgraph::test {

/// SplitMix64 (Steele, Lea and Flood 2014): integers only, so the same sequence on every platform.
class integer_generator {
 public:
  explicit integer_generator(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  /// In [0, bound).
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

  /// Random mantissa and exponent, 2^lowest <= x < 2^highest; never zero.
  float positive_value(int lowest, int highest) {
    const std::uint64_t random = next();
    const auto exponents = static_cast<std::uint64_t>(highest - lowest);
    const auto exponent =
        static_cast<std::uint32_t>(127 + lowest + static_cast<int>((random >> 32) % exponents));
    return std::bit_cast<float>((exponent << 23) | (static_cast<std::uint32_t>(random) >> 9));
  }

  /// As positive_value, of either sign.
  float signed_value(int lowest, int highest) {
    const float magnitude = positive_value(lowest, highest);
    return (next() >> 63) != 0 ? -magnitude : magnitude;
  }

 private:
  std::uint64_t state_;
};

}  // namespace stepgraph::test
