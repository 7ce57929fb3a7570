#include "stepgraph/math/restricted.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/random_numbers.hpp"

namespace stepgraph {
namespace {

TEST(RestrictedSquareRoot, IsIeeeOnItsDomainOnTheHost) {
  test::integer_generator random(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = random.positive_value(-101, 128);
    ASSERT_EQ(math::restricted_square_root(x), static_cast<float>(std::sqrt(double{x})));
  }
  EXPECT_EQ(math::restricted_square_root(0x1p-100f), 0x1p-50f);
  EXPECT_EQ(math::restricted_square_root(std::numeric_limits<float>::max()), 0x1.fffffep63f);
}

TEST(RestrictedReciprocal, IsIeeeOnItsDomainOnTheHost) {
  test::integer_generator random(2);
  for (int i = 0; i < 200000; ++i) {
    const float x = random.positive_value(-100, 100);
    ASSERT_EQ(math::restricted_reciprocal(x), 1.0f / x);
  }
  EXPECT_EQ(math::restricted_reciprocal(0x1p-100f), 0x1p100f);
  EXPECT_EQ(math::restricted_reciprocal(0x1p100f), 0x1p-100f);
}

}  // namespace
}  // namespace stepgraph
