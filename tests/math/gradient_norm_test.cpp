#include "stepgraph/math/gradient_norm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/random_numbers.hpp"

namespace stepgraph {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

double sum_of_squares(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float value : values) math::add_square(sum, value);
  return sum;
}

double norm_of(const std::vector<float>& values) { return std::sqrt(sum_of_squares(values)); }

double reference_norm(const std::vector<float>& values) {
  long double sum = 0.0L;
  for (const float value : values) sum += static_cast<long double>(value) * value;
  return static_cast<double>(std::sqrt(sum));
}

void expect_norm_near_reference(const std::vector<float>& values) {
  const double expected = reference_norm(values);
  // Every addition rounds once, and the root halves the relative error.
  const double tolerance = 0x1p-54 * static_cast<double>(values.size() + 2);
  EXPECT_NEAR(norm_of(values) / expected, 1.0, tolerance) << expected;
}

TEST(AddSquare, SurvivesGradientsWhoseSquaresOverflow) {
  EXPECT_NEAR(norm_of(std::vector<float>(100, 1e20f)) / (10.0 * 1e20f), 1.0, 1e-14);
  expect_norm_near_reference({std::numeric_limits<float>::max(), 1.0f});
  // As many of the largest as a tensor of 2^32 elements has.
  double sum = 0.0;
  math::add_square(sum, std::numeric_limits<float>::max());
  EXPECT_TRUE(math::is_finite(sum * 0x1p32));
}

TEST(AddSquare, SurvivesGradientsWhoseSquaresVanish) {
  EXPECT_NEAR(norm_of(std::vector<float>(100, 1e-25f)) / (10.0 * 1e-25f), 1.0, 1e-14);
  // The smallest subnormal.
  EXPECT_EQ(norm_of({0x1p-149f}), 0x1p-149);
}

TEST(AddSquare, AddsValuesOfVeryDifferentSize) {
  expect_norm_near_reference({1e20f, 1.0f, 1e-25f});
  expect_norm_near_reference({1.0f, 1e-25f, -1e-25f});
  test::integer_generator random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> values;
    const int lowest = static_cast<int>(random.below(240)) - 126;
    for (int i = 0; i < 50; ++i) values.push_back(random.signed_value(lowest, lowest + 12));
    expect_norm_near_reference(values);
  }
}

TEST(AddSquare, OfNothingAndOfZerosIsZero) {
  EXPECT_EQ(norm_of({}), 0.0);
  EXPECT_EQ(norm_of({0.0f, -0.0f}), 0.0);
}

TEST(AddSquare, OneElementThatIsNotFiniteMakesTheSumSo) {
  for (const float bad : {infinity, -infinity, nan, -nan}) {
    for (std::size_t position = 0; position < 5; ++position) {
      std::vector<float> values = {1.0f, 1e20f, 0.0f, -3.0f, 1e-25f};
      values[position] = bad;
      EXPECT_FALSE(math::is_finite(sum_of_squares(values))) << bad << " at " << position;
    }
  }
}

TEST(MagnitudeBits, AreOrderedAsMagnitudesWithInfinityAndNaNAbove) {
  const float ascending[] = {0.0f, 0x1p-149f, 0x1p-126f, 1.0f, std::numeric_limits<float>::max()};
  for (std::size_t i = 1; i < std::size(ascending); ++i) {
    EXPECT_LT(math::magnitude_bits(ascending[i - 1]), math::magnitude_bits(ascending[i]));
    EXPECT_EQ(math::magnitude_bits(-ascending[i]), math::magnitude_bits(ascending[i]));
  }
  EXPECT_EQ(math::magnitude_bits(-0.0f), 0u);
  EXPECT_GT(math::magnitude_bits(-infinity), math::magnitude_bits(std::end(ascending)[-1]));
  EXPECT_GT(math::magnitude_bits(-nan), math::magnitude_bits(infinity));
}

TEST(IsFinite, IsFalseForInfinitiesAndNaN) {
  for (const double value : {0.0, -1.0, 0x1p-1074, std::numeric_limits<double>::max(),
                             std::numeric_limits<double>::lowest()}) {
    EXPECT_TRUE(math::is_finite(value)) << value;
  }
  for (const float value : {infinity, -infinity, nan, -nan}) {
    EXPECT_FALSE(math::is_finite(static_cast<double>(value))) << value;
  }
}

}  // namespace
}  // namespace stepgraph
