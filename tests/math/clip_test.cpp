#include "stepgraph/math/clip.hpp"

#include <gtest/gtest.h>

#include <limits>

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

TEST(ClipCoefficient, IsOneWithoutAMaximum) {
  EXPECT_EQ(math::clip_coefficient(1e30, 0.0), 1.0);
  EXPECT_EQ(math::clip_coefficient(1e30, -1.0), 1.0);
  EXPECT_EQ(math::clip_coefficient(1e30, std::numeric_limits<double>::quiet_NaN()), 1.0);
}

}  // namespace
}  // namespace stepgraph
