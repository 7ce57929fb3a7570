#include "stepgraph/math/block_scale.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "common/random_numbers.hpp"

namespace stepgraph {
namespace {

template <storage_format Format>
struct format_under_test {
  static constexpr storage_format format = Format;
  using traits = math::format_traits<Format>;
  static constexpr double largest = Format == storage_format::e4m3 ? 448.0 : 65504.0;

  static std::uint32_t scale_of(float magnitude) {
    return math::block_scale_of<Format>(math::float_bits(magnitude));
  }
};

template <class Format>
class BlockScale : public ::testing::Test {};

struct format_names {
  template <class Format>
  static std::string GetName(int) {
    return name_of(Format::format);
  }
};
using block_formats = ::testing::Types<format_under_test<storage_format::e4m3>,
                                       format_under_test<storage_format::f16>>;
TYPED_TEST_SUITE(BlockScale, block_formats, format_names);

/// Random magnitudes, and those around the largest value of the format at every scale.
template <class Body>
void for_magnitudes(double largest, Body&& body) {
  test::integer_generator random(3);
  for (int i = 0; i < 100000; ++i) body(random.positive_value(-126, 127));
  for (int exponent = -140; exponent < 128; ++exponent) {
    const auto edge = static_cast<float>(std::ldexp(largest, exponent));
    if (!std::isfinite(edge)) continue;
    for (const float value :
         {edge, std::nextafter(edge, 0.0f), std::nextafter(edge, 2.0f * edge)}) {
      if (std::isfinite(value)) body(value);
    }
  }
}

TYPED_TEST(BlockScale, IsTheSmallestForWhichTheLargestMagnitudeFits) {
  for_magnitudes(TypeParam::largest, [](float magnitude) {
    const std::uint32_t scale = TypeParam::scale_of(magnitude);
    ASSERT_GE(scale, 1u);
    ASSERT_LE(scale, 253u);
    const double scaled = std::ldexp(static_cast<double>(magnitude), 127 - static_cast<int>(scale));
    ASSERT_LE(scaled, TypeParam::largest) << std::hexfloat << magnitude;
    if (scale > 1) {
      ASSERT_GT(2.0 * scaled, TypeParam::largest) << std::hexfloat << magnitude;
    }
  });
}

TYPED_TEST(BlockScale, FactorAndInverseAreNormalPowersOfTwo) {
  for (std::uint32_t scale = 1; scale <= 253; ++scale) {
    const float factor = math::block_factor(scale);
    const float inverse = math::inverse_block_factor(scale);
    EXPECT_TRUE(std::isnormal(factor) && std::isnormal(inverse));
    EXPECT_EQ(factor, std::ldexp(1.0f, static_cast<int>(scale) - 127));
    EXPECT_EQ(factor * inverse, 1.0f);
  }
}

TYPED_TEST(BlockScale, EndsOfTheRangeAreClamped) {
  EXPECT_EQ(TypeParam::scale_of(0.0f), 1u);
  EXPECT_EQ(TypeParam::scale_of(std::numeric_limits<float>::denorm_min()), 1u);
  EXPECT_LE(TypeParam::scale_of(std::numeric_limits<float>::max()), 253u);
  EXPECT_LE(TypeParam::scale_of(std::numeric_limits<float>::infinity()), 253u);
  EXPECT_LE(TypeParam::scale_of(std::numeric_limits<float>::quiet_NaN()), 253u);
}

// Scaling by a power of two rounds nothing, so all that is lost is what the format rounds.
TYPED_TEST(BlockScale, StoredNeighboursAreWithinHalfAPlaceOfTheFormat) {
  constexpr int mantissa_bits = TypeParam::format == storage_format::e4m3 ? 3 : 10;
  constexpr int lowest_exponent = TypeParam::format == storage_format::e4m3 ? -6 : -14;
  test::integer_generator random(4);
  for (int i = 0; i < 100000; ++i) {
    const float largest = random.positive_value(-60, 60);
    const float neighbour = largest * std::ldexp(random.positive_value(-1, 0), -(i % 40));
    const std::uint32_t scale = TypeParam::scale_of(largest);
    const float scaled = neighbour * math::inverse_block_factor(scale);
    const float stored = TypeParam::traits::decode(TypeParam::traits::encode(scaled));
    const int exponent = std::max(std::ilogb(scaled), lowest_exponent);
    ASSERT_LE(std::abs(stored - scaled), std::ldexp(0.5, exponent - mantissa_bits))
        << std::hexfloat << neighbour << " beside " << largest;
  }
}

TYPED_TEST(BlockScale, RootIsZeroForZeroAlone) {
  const auto stored = [](float second_moment, std::uint32_t scale) {
    const float root = math::stored_root(second_moment);
    return TypeParam::traits::encode(
        math::scaled_root<TypeParam::format>(root, math::inverse_block_factor(scale)));
  };
  for (std::uint32_t scale = 1; scale <= 253; ++scale) {
    EXPECT_EQ(stored(0.0f, scale), 0);
    EXPECT_EQ(stored(-0.0f, scale), 0);
  }
  test::integer_generator random(5);
  for (int i = 0; i < 100000; ++i) {
    const float second_moment = random.positive_value(-126, 127);
    // Beside neighbours of any size.
    const auto scale = static_cast<std::uint32_t>(1 + random.below(253));
    ASSERT_NE(stored(second_moment, scale), 0) << std::hexfloat << second_moment << " " << scale;
  }
  EXPECT_NE(stored(std::numeric_limits<float>::denorm_min(), 253), 0);
}

TEST(StoredRoot, IsTheSquareRootAboveTheBoundOfTheDenominator) {
  test::integer_generator random(6);
  for (int i = 0; i < 100000; ++i) {
    const float second_moment = random.positive_value(-100, 127);
    ASSERT_EQ(math::stored_root(second_moment), std::sqrt(second_moment));
  }
  EXPECT_EQ(math::stored_root(0x1p-120f), std::sqrt(0x1p-101f));
  EXPECT_EQ(math::stored_root(0.0f), 0.0f);
}

TEST(LargerMagnitude, TakesTheLargerAndPassesOverNaN) {
  EXPECT_EQ(math::larger_magnitude(1.0f, -2.0f), 2.0f);
  EXPECT_EQ(math::larger_magnitude(3.0f, -2.0f), 3.0f);
  EXPECT_EQ(math::larger_magnitude(3.0f, std::numeric_limits<float>::quiet_NaN()), 3.0f);
  EXPECT_EQ(math::larger_magnitude(0.0f, -0.0f), 0.0f);
}

}  // namespace
}  // namespace stepgraph
