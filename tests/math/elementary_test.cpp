#include "stepgraph/math/elementary.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

#include "common/random_numbers.hpp"

namespace stepgraph {
namespace {

/// The distance of `computed` from `exact` in last places of double.
long double error_in_ulp(double computed, long double exact) {
  const double rounded = std::abs(static_cast<double>(exact));
  const double ulp = std::nextafter(rounded, std::numeric_limits<double>::infinity()) - rounded;
  return std::abs(static_cast<long double>(computed) - exact) / static_cast<long double>(ulp);
}

double random_fraction(test::integer_generator& random) {
  return static_cast<double>(random.next() >> 11) * 0x1p-53;
}

/// Any positive normal double.
double random_positive(test::integer_generator& random) {
  const std::uint64_t exponent = 1 + random.below(2046);
  return std::bit_cast<double>((exponent << 52) | (random.next() >> 12));
}

/// cos(pi * x) to more places than double has, the difference from 1/2 being exact.
long double exact_cosine_of_pi_times(double x) {
  constexpr long double pi = std::numbers::pi_v<long double>;
  const long double wide = x;
  return std::abs(x - 0.5) < 0.25 ? std::sin(pi * (0.5L - wide)) : std::cos(pi * wide);
}

void expect_cosine_within_two_ulp(double x) {
  ASSERT_LE(error_in_ulp(math::cosine_of_pi_times(x), exact_cosine_of_pi_times(x)), 2.0L)
      << std::hexfloat << x;
}

TEST(CosineOfPiTimes, IsExactAtTheEndsAndInTheMiddle) {
  EXPECT_EQ(math::cosine_of_pi_times(0.0), 1.0);
  EXPECT_EQ(math::cosine_of_pi_times(0.5), 0.0);
  EXPECT_EQ(math::cosine_of_pi_times(1.0), -1.0);
}

TEST(CosineOfPiTimes, IsWithinTwoUlp) {
  for (int i = 0; i <= 100000; ++i) expect_cosine_within_two_ulp(i / 100000.0);
  test::integer_generator random(3);
  for (int i = 0; i < 100000; ++i) {
    expect_cosine_within_two_ulp(random_fraction(random));
  }
  for (const double centre : {0.25, 0.5, 0.75}) {
    for (double distance = 0x1p-54; distance < 0.2; distance *= 2.0) {
      expect_cosine_within_two_ulp(centre - distance);
      expect_cosine_within_two_ulp(centre + distance);
    }
  }
}

TEST(Log2, IsExactAtPowersOfTwo) {
  for (int exponent = -1074; exponent <= 1023; ++exponent) {
    ASSERT_EQ(math::log2(std::ldexp(1.0, exponent)), exponent);
  }
}

TEST(Log2, IsWithinOneUlp) {
  test::integer_generator random(5);
  const auto expect = [](double x) {
    ASSERT_LE(error_in_ulp(math::log2(x), std::log2(static_cast<long double>(x))), 1.0L)
        << std::hexfloat << x;
  };
  for (int i = 0; i < 200000; ++i) expect(random_positive(random));
  for (int i = 0; i < 200000; ++i) expect(0.5 + 1.5 * random_fraction(random));
  for (double distance = 0x1p-53; distance < 0.5; distance *= 1.5) {
    expect(1.0 - distance);
    expect(1.0 + distance);
  }
  expect(std::numeric_limits<double>::denorm_min() * 3.0);
  expect(std::numeric_limits<double>::max());
}

TEST(Exp2, IsExactAtIntegers) {
  for (int exponent = -1074; exponent <= 1023; ++exponent) {
    ASSERT_EQ(math::exp2(exponent), std::ldexp(1.0, exponent));
  }
}

TEST(Exp2, IsWithinTwoUlpWhereTheResultIsNormal) {
  test::integer_generator random(7);
  for (int i = 0; i < 200000; ++i) {
    const double x = i % 2 == 0 ? 2.0 * random_fraction(random) - 1.0
                                : 2045.0 * random_fraction(random) - 1022.0;
    ASSERT_LE(error_in_ulp(math::exp2(x), std::exp2(static_cast<long double>(x))), 2.0L)
        << std::hexfloat << x;
  }
}

TEST(Exp2, EndsInZeroAndInfinity) {
  EXPECT_EQ(math::exp2(-1076.0), 0.0);
  EXPECT_EQ(math::exp2(-1e300), 0.0);
  EXPECT_EQ(math::exp2(1024.0), std::numeric_limits<double>::infinity());
  EXPECT_EQ(math::exp2(1e300), std::numeric_limits<double>::infinity());
}

void expect_accurate_power(double x, double y) {
  const long double exact = std::pow(static_cast<long double>(x), static_cast<long double>(y));
  if (exact < 0x1p-1022L || exact > 0x1p1023L) return;
  const long double error = std::abs(static_cast<long double>(math::power(x, y)) - exact) / exact;
  ASSERT_LE(error, 2e-15L) << std::hexfloat << x << " to the power " << y;
}

TEST(Power, IsAccurateWhateverTheSizeOfTheExponent) {
  test::integer_generator random(11);
  for (int i = 0; i < 200000; ++i) {
    const double x = random_positive(random);
    expect_accurate_power(x, 2.0 * random_fraction(random) - 1.0);
  }
  // The decay factors of long trainings: near 1, to powers near the reciprocal of the distance.
  for (double distance = 0x1p-40; distance < 0.5; distance *= 1.25) {
    for (int i = 0; i < 1000; ++i) {
      const double y = std::floor(700.0 / distance * random_fraction(random));
      expect_accurate_power(1.0 - distance, y);
      expect_accurate_power(1.0 + distance, y);
    }
  }
}

TEST(Power, IsExactWhereArithmeticIs) {
  EXPECT_EQ(math::power(0.7, 0.0), 1.0);
  EXPECT_EQ(math::power(1.0, 1e300), 1.0);
  EXPECT_EQ(math::power(2.0, -30.0), 0x1p-30);
  EXPECT_EQ(math::power(0.25, 0.5), 0.5);
  EXPECT_EQ(math::power(0.0, 0.0), 1.0);
  EXPECT_EQ(math::power(0.0, 2.5), 0.0);
}

TEST(Power, UnderflowsToZeroAndOverflowsToInfinity) {
  EXPECT_EQ(math::power(0.1, 400.0), 0.0);
  EXPECT_EQ(math::power(0.1, 1e300), 0.0);
  EXPECT_EQ(math::power(10.0, 400.0), std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace stepgraph
