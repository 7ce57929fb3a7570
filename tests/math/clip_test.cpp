#include "stepgraph/math/clip.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace stepgraph {
namespace {

TEST(ClipCoefficient, IsOneForAZeroNorm) { EXPECT_EQ(math::clip_coefficient(0.0, 1.0), 1.0); }

TEST(ClipCoefficient, IsOneUpToTheMaximum) {
  EXPECT_EQ(math::clip_coefficient(0.5, 1.0), 1.0);
  EXPECT_EQ(math::clip_coefficient(1.0 - 1e-6, 1.0), 1.0);
}

TEST(ClipCoefficient, BringsALargerNormToTheMaximum) {
  EXPECT_DOUBLE_EQ(math::clip_coefficient(5.0, 2.5), 2.5 / (5.0 + 1e-6));
  EXPECT_DOUBLE_EQ(math::clip_coefficient(1e21, 1.0), 1e-21);
  EXPECT_LT(math::clip_coefficient(1.0, 1.0), 1.0);
}

// The division is left out where it could only give 1 or more: no bit may depend on that.
TEST(ClipCoefficient, IsTheQuotientOnBothSidesOfTheMaximum) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponent(-40.0, 40.0);
  for (int i = 0; i < 10000; ++i) {
    const double max_norm = std::exp2(exponent(random));
    double norm = std::max(max_norm - 1e-6, 0.0);
    for (int step = 0; step < 4; ++step) norm = std::nextafter(norm, 0.0);
    for (int step = 0; step < 8; ++step) {
      EXPECT_EQ(math::clip_coefficient(norm, max_norm), std::min(max_norm / (norm + 1e-6), 1.0))
          << max_norm << " " << norm;
      norm = std::nextafter(norm, std::numeric_limits<double>::infinity());
    }
  }
}

TEST(ClipCoefficient, IsZeroForAnInfiniteNormAndOneForNaN) {
  EXPECT_EQ(math::clip_coefficient(std::numeric_limits<double>::infinity(), 1.0), 0.0);
  EXPECT_EQ(math::clip_coefficient(std::numeric_limits<double>::quiet_NaN(), 1.0), 1.0);
}

TEST(ClipCoefficient, IsOneWithoutAMaximum) {
  EXPECT_EQ(math::clip_coefficient(1e30, 0.0), 1.0);
  EXPECT_EQ(math::clip_coefficient(1e30, -1.0), 1.0);
  EXPECT_EQ(math::clip_coefficient(1e30, std::numeric_limits<double>::quiet_NaN()), 1.0);
}

}  // namespace
}  // namespace stepgraph
