#include "stepgraph/math/remainder.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace stepgraph {
namespace {

void expect_lossless(std::uint32_t bits) {
  const float master = math::bits_to_float(bits);
  const std::uint16_t parameter = math::rounded_parameter(master);
  const std::uint16_t remainder = math::remainder_of(master);
  ASSERT_EQ(math::float_bits(math::join_remainder(parameter, remainder)), bits) << std::hex << bits;
}

TEST(Remainder, PairIsTheMasterForEveryExponentAndEdgeMantissa) {
  for (std::uint32_t upper = 0; upper < 0x200u; ++upper) {  // sign and exponent, NaN included
    for (const std::uint32_t mantissa :
         {0x000000u, 0x000001u, 0x007fffu, 0x008000u, 0x008001u, 0x00ffffu, 0x010000u, 0x017fffu,
          0x018000u, 0x3fffffu, 0x400000u, 0x7f7fffu, 0x7f8000u, 0x7fffffu}) {
      expect_lossless((upper << 23) | mantissa);
    }
  }
}

TEST(Remainder, PairIsTheMasterOverASweepOfAllFloats) {
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 1021) {
    expect_lossless(static_cast<std::uint32_t>(bits));
    if (HasFatalFailure()) return;
  }
}

TEST(Remainder, EveryPairIsTheOnlyOneOfItsMaster) {
  for (std::uint32_t parameter = 0; parameter < 0x10000u; parameter += 13) {
    for (const std::uint32_t remainder :
         {0x0000u, 0x0001u, 0x1234u, 0x7fffu, 0x8000u, 0x8001u, 0xfedcu, 0xffffu}) {
      const float master = math::join_remainder(static_cast<std::uint16_t>(parameter),
                                                static_cast<std::uint16_t>(remainder));
      ASSERT_EQ(math::rounded_parameter(master), parameter) << remainder;
      ASSERT_EQ(math::remainder_of(master), remainder) << parameter;
    }
  }
}

TEST(Remainder, ParameterIsTheNearestAndTiesGoAwayFromZero) {
  using bf16 = math::format_traits<storage_format::bf16>;
  for (std::uint64_t bits = 0; bits < 0x7f7f8000u; bits += 509) {
    for (const std::uint64_t sign : {0u, 0x80000000u}) {
      const float master = math::bits_to_float(static_cast<std::uint32_t>(bits | sign));
      const std::uint16_t parameter = math::rounded_parameter(master);
      if ((bits & 0xffffu) == 0x8000u) {
        ASSERT_GT(std::abs(bf16::decode(parameter)), std::abs(master)) << std::hex << bits;
      } else {
        ASSERT_EQ(parameter, bf16::encode(master)) << std::hex << bits;
      }
    }
  }
}

}  // namespace
}  // namespace stepgraph
