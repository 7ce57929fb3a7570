#include "stepgraph/math/sum_of_squares.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "common/random_numbers.hpp"

namespace stepgraph {
namespace {

double norm_of(const std::vector<float>& values) {
  math::scaled_sum sum;
  for (const float value : values) math::add_square(sum, value);
  return std::sqrt(math::total(sum));
}

double reference_norm(const std::vector<float>& values) {
  long double sum = 0.0L;
  for (const float value : values) sum += static_cast<long double>(value) * value;
  return static_cast<double>(std::sqrt(sum));
}

void expect_norm_near_reference(const std::vector<float>& values) {
  const double expected = reference_norm(values);
  // Every addition rounds once, and the root halves the relative error.
  const double tolerance = 0x1p-25 * static_cast<double>(values.size() + 2);
  EXPECT_NEAR(norm_of(values) / expected, 1.0, tolerance) << expected;
}

TEST(SumOfSquares, SurvivesGradientsWhoseSquaresOverflow) {
  const std::vector<float> values(100, 1e20f);
  EXPECT_NEAR(norm_of(values) / 1e21, 1.0, 1e-6);
  expect_norm_near_reference({std::numeric_limits<float>::max(), 1.0f});
}

TEST(SumOfSquares, SurvivesGradientsWhoseSquaresVanish) {
  EXPECT_NEAR(norm_of(std::vector<float>(100, 1e-25f)) / 1e-24, 1.0, 1e-6);
  // The smallest subnormal.
  EXPECT_EQ(norm_of({0x1p-149f}), 0x1p-149);
}

TEST(SumOfSquares, AddsValuesOfVeryDifferentSize) {
  expect_norm_near_reference({1e20f, 1.0f, 1e-25f});
  expect_norm_near_reference({1.0f, 1e-25f, -1e-25f});
  expect_norm_near_reference({3e12f, 4e11f, 0x1p40f});
  expect_norm_near_reference({0x1p-40f, 0x1.fffffep-41f, -0x1p-41f});
  test::integer_generator random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> values;
    const int lowest = static_cast<int>(random.below(240)) - 126;
    for (int i = 0; i < 50; ++i) values.push_back(random.signed_value(lowest, lowest + 12));
    expect_norm_near_reference(values);
  }
}

TEST(SumOfSquares, OfNothingAndOfZerosIsZero) {
  EXPECT_EQ(norm_of({}), 0.0);
  EXPECT_EQ(norm_of({0.0f, -0.0f}), 0.0);
}

TEST(SumOfSquares, ScaledPartsAddByPart) {
  const math::scaled_sum sum =
      math::scaled_sum{1.0f, 2.0f, 3.0f} + math::scaled_sum{4.0f, 5.0f, 6.0f};
  EXPECT_EQ(sum.small, 5.0f);
  EXPECT_EQ(sum.medium, 7.0f);
  EXPECT_EQ(sum.large, 9.0f);
}

TEST(IsFinite, IsFalseForInfinitiesAndNaN) {
  for (const float value : {0.0f, -1.0f, 0x1p-149f, std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::lowest()}) {
    EXPECT_TRUE(math::is_finite(value)) << value;
  }
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float value : {infinity, -infinity, nan, -nan}) {
    EXPECT_FALSE(math::is_finite(value)) << value;
  }
}

}  // namespace
}  // namespace stepgraph
