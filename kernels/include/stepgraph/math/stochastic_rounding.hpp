#pragma once

#include <cstdint>

#include "stepgraph/math/rounding.hpp"

/// Stochastic rounding of f32 to bf16: a value between two neighbours becomes the upper one with
/// the probability of its distance from the lower, so that small updates survive on average.
namespace stepgraph::math {

/// The numbers that decide a stochastic rounding, of one tensor at one step.
struct rounding_source {
  bool stochastic = false;
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint32_t tensor = 0;
};

/// Four random words.
struct random_words {
  std::uint32_t word[4];
};

STEPGRAPH_HOST_DEVICE std::uint32_t high_product(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(a) * b) >> 32);
#endif
}

/// Philox4x32 with 7 rounds (Salmon et al. 2011), the fewest that pass BigCrush, for the four
/// elements from 4 * quad. The counter is (quad, tensor, step), the key the seed: replays differ,
/// reruns repeat, and the result does not depend on launch shapes. The upper half of the step is
/// folded into the key.
STEPGRAPH_HOST_DEVICE random_words random_of(const rounding_source& source, std::uint64_t quad) {
  std::uint32_t c0 = static_cast<std::uint32_t>(quad);
  std::uint32_t c1 = static_cast<std::uint32_t>(quad >> 32);
  std::uint32_t c2 = source.tensor;
  std::uint32_t c3 = static_cast<std::uint32_t>(source.step);
  std::uint32_t k0 = static_cast<std::uint32_t>(source.seed);
  std::uint32_t k1 =
      static_cast<std::uint32_t>(source.seed >> 32) ^ static_cast<std::uint32_t>(source.step >> 32);
  for (int round = 0; round < 7; ++round) {
    const std::uint32_t high0 = high_product(0xd2511f53u, c0);
    const std::uint32_t low0 = 0xd2511f53u * c0;
    const std::uint32_t high1 = high_product(0xcd9e8d57u, c2);
    const std::uint32_t low1 = 0xcd9e8d57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Rounds with 16 of the random bits. Infinities and NaN as in rounding to nearest.
STEPGRAPH_HOST_DEVICE std::uint16_t round_stochastically(float value, std::uint32_t random) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t rounded = (bits + (random & 0xffffu)) >> 16;
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  return finite ? static_cast<std::uint16_t>(rounded)
                : format_traits<storage_format::bf16>::encode(value);
}

}  // namespace stepgraph::math
