#include "stepgraph/math/stochastic_rounding.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "common/random_numbers.hpp"

namespace stepgraph {
namespace {

using bf16 = math::format_traits<storage_format::bf16>;

TEST(RoundStochastically, ValuesThatTheFormatHoldsStayWhateverTheBits) {
  for (std::uint32_t code = 0; code < 0x10000u; ++code) {
    const float value = bf16::decode(static_cast<std::uint16_t>(code));
    if (std::isnan(value)) continue;
    for (const std::uint32_t random : {0u, 1u, 0x8000u, 0xffffu, 0xffffffffu}) {
      ASSERT_EQ(math::round_stochastically(value, random), code) << std::hex << code;
    }
  }
}

TEST(RoundStochastically, GoesUpForAsManyBitPatternsAsTheDistanceFromTheLowerNeighbour) {
  test::integer_generator random(1);
  for (int i = 0; i < 50; ++i) {
    const float value = random.signed_value(-120, 120);
    const std::uint32_t bits = math::float_bits(value);
    const auto lower = static_cast<std::uint16_t>(bits >> 16);  // towards zero
    std::uint32_t away = 0;
    for (std::uint32_t pattern = 0; pattern < 0x10000u; ++pattern) {
      const std::uint16_t code = math::round_stochastically(value, pattern);
      ASSERT_TRUE(code == lower || code == lower + 1) << std::hexfloat << value;
      away += code == lower ? 0 : 1;
    }
    EXPECT_EQ(away, bits & 0xffffu) << std::hexfloat << value;
  }
}

TEST(RoundStochastically, UsesTheLowerHalfOfTheRandomBits) {
  EXPECT_EQ(math::round_stochastically(0x1.01p0f, 0xffff0000u), 0x3f80);
  EXPECT_EQ(math::round_stochastically(0x1.01p0f, 0x0000ffffu), 0x3f81);
}

TEST(RoundStochastically, InfinitiesAndNaNAreRoundedAsByNearest) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::uint32_t random : {0u, 0xffffu, 0x12345678u}) {
    EXPECT_EQ(math::round_stochastically(infinity, random), 0x7f80);
    EXPECT_EQ(math::round_stochastically(-infinity, random), 0xff80);
    for (const std::uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xffffffffu}) {
      EXPECT_EQ(math::round_stochastically(math::bits_to_float(nan), random), 0x7fff);
    }
  }
}

// Past the largest bf16 the upper neighbour is infinity, in proportion as everywhere.
TEST(RoundStochastically, LargestFloatBecomesTheLargestOrInfinity) {
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(math::round_stochastically(largest, 0), 0x7f7f);
  EXPECT_EQ(math::round_stochastically(largest, 1), 0x7f80);
}

/// Philox4x32 as its authors wrote it down (Salmon et al. 2011, section 3.3): each round multiplies
/// words 0 and 2 and swaps the halves; the key grows by the Weyl constants. With 10 rounds it is
/// checked against their known answers, and with 7 it is what the library should compute.
std::vector<std::uint32_t> philox(std::vector<std::uint32_t> counter,
                                  std::vector<std::uint32_t> key, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t second = std::uint64_t{0xCD9E8D57} * counter[2];
    const auto upper = [](std::uint64_t product) {
      return static_cast<std::uint32_t>(product >> 32);
    };
    const auto lower = [](std::uint64_t product) { return static_cast<std::uint32_t>(product); };
    counter = {upper(second) ^ counter[1] ^ key[0], lower(second),
               upper(first) ^ counter[3] ^ key[1], lower(first)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

TEST(RandomOf, ReferenceReproducesTheKnownAnswersOfTenRounds) {
  const std::uint32_t ones = 0xffffffffu;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}, 10),
            (std::vector<std::uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({ones, ones, ones, ones}, {ones, ones}, 10),
            (std::vector<std::uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, 10),
            (std::vector<std::uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomOf, IsPhiloxWithSevenRoundsOfQuadTensorStepAndSeed) {
  test::integer_generator random(2);
  for (int i = 0; i < 1000; ++i) {
    const math::rounding_source source = {true, random.next(), random.next(),
                                          static_cast<std::uint32_t>(random.next())};
    const std::uint64_t quad = random.next();
    const auto low = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
    const auto high = [](std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); };
    const std::vector<std::uint32_t> expected =
        philox({low(quad), high(quad), source.tensor, low(source.step)},
               {low(source.seed), high(source.seed) ^ high(source.step)}, 7);
    const math::random_words found = math::random_of(source, quad);
    ASSERT_EQ(std::vector<std::uint32_t>(found.word, found.word + 4), expected);
  }
}

TEST(RandomOf, EveryPartOfTheKeyMatters) {
  const auto first = [](const math::rounding_source& source, std::uint64_t quad) {
    return math::random_of(source, quad).word[0];
  };
  std::set<std::uint32_t> words;
  words.insert(first({true, 1, 1, 1}, 1));
  words.insert(first({true, 2, 1, 1}, 1));
  words.insert(first({true, 1ull << 40, 1, 1}, 1));
  words.insert(first({true, 1, 2, 1}, 1));
  words.insert(first({true, 1, 1 + (1ull << 40), 1}, 1));
  words.insert(first({true, 1, 1, 2}, 1));
  words.insert(first({true, 1, 1, 1}, 2));
  words.insert(first({true, 1, 1, 1}, 1 + (1ull << 40)));
  EXPECT_EQ(words.size(), 8u);
}

}  // namespace
}  // namespace stepgraph
