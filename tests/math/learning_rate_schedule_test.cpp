#include "stepgraph/math/learning_rate_schedule.hpp"

#include <gtest/gtest.h>

#include <string>

#include "common/reference_schedule.hpp"

namespace stepgraph {
namespace {

struct schedule_case {
  const char* name;
  learning_rate_schedule schedule;
};

constexpr schedule_case schedule_cases[] = {
    {"constant", {schedule_shape::constant, 0, 0.0, 3e-4, 0.0, 0, 0}},
    {"constant_warmup", {schedule_shape::constant, 0, 1e-7, 3e-4, 0.0, 10, 0}},
    {"linear", {schedule_shape::linear, 0, 0.0, 1e-3, 1e-5, 0, 100}},
    {"linear_warmup", {schedule_shape::linear, 0, 1e-6, 1e-3, 1e-5, 20, 100}},
    {"linear_to_zero", {schedule_shape::linear, 0, 0.0, 1e-3, 0.0, 1, 7}},
    {"cosine", {schedule_shape::cosine, 0, 0.0, 1e-3, 1e-4, 0, 97}},
    {"cosine_warmup", {schedule_shape::cosine, 0, 1e-6, 1e-3, 1e-4, 13, 101}},
    {"cosine_rising", {schedule_shape::cosine, 0, 1.0, 1e-3, 1e-2, 5, 50}},
    {"decay_ends_with_warmup", {schedule_shape::linear, 0, 0.0, 1e-3, 1e-5, 30, 30}},
    {"decay_ends_before_warmup", {schedule_shape::cosine, 0, 0.0, 1e-3, 1e-5, 30, 10}},
    {"no_decay", {schedule_shape::linear, 0, 0.0, 1e-3, 1e-5, 0, 0}},
};

class LearningRateSchedule : public ::testing::TestWithParam<schedule_case> {};

TEST_P(LearningRateSchedule, FollowsItsFormulaAtEveryStep) {
  const learning_rate_schedule& schedule = GetParam().schedule;
  for (std::uint64_t n = 0; n < 150; ++n) {
    const double expected = test::reference_learning_rate(schedule, n);
    // Relative to the ends, between which the cosine part may cancel.
    const double size = schedule.maximum + schedule.minimum;
    EXPECT_NEAR(math::learning_rate_at(schedule, n), expected, 1e-15 * size + 4e-16 * expected)
        << "step " << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LearningRateSchedule, ::testing::ValuesIn(schedule_cases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST(LearningRateBoundaries, WarmupStartsAtInitialAndEndsAtMaximum) {
  const learning_rate_schedule schedule = {schedule_shape::linear, 0, 1e-6, 1e-3, 1e-5, 8, 16};
  EXPECT_EQ(math::learning_rate_at(schedule, 0), 1e-6);
  EXPECT_DOUBLE_EQ(math::learning_rate_at(schedule, 8), 1e-3);
  EXPECT_LT(math::learning_rate_at(schedule, 9), 1e-3);
}

TEST(LearningRateBoundaries, WithoutWarmupTheFirstStepHasTheMaximum) {
  for (const schedule_shape shape :
       {schedule_shape::constant, schedule_shape::linear, schedule_shape::cosine}) {
    EXPECT_EQ(math::learning_rate_at({shape, 0, 1e-6, 1e-3, 1e-5, 0, 16}, 0), 1e-3);
  }
}

TEST(LearningRateBoundaries, DecayEndsAtMinimumAndStaysThere) {
  for (const schedule_shape shape : {schedule_shape::linear, schedule_shape::cosine}) {
    const learning_rate_schedule schedule = {shape, 0, 0.0, 1e-3, 1e-5, 4, 16};
    EXPECT_GT(math::learning_rate_at(schedule, 15), 1e-5);
    EXPECT_DOUBLE_EQ(math::learning_rate_at(schedule, 16), 1e-5);
    EXPECT_EQ(math::learning_rate_at(schedule, 17), 1e-5);
    EXPECT_EQ(math::learning_rate_at(schedule, 1'000'000'000'000), 1e-5);
  }
}

TEST(LearningRateBoundaries, CosineIsHalfWayInTheMiddle) {
  const learning_rate_schedule schedule = {schedule_shape::cosine, 0, 0.0, 3.0, 1.0, 10, 30};
  EXPECT_EQ(math::learning_rate_at(schedule, 20), 2.0);
}

}  // namespace
}  // namespace stepgraph
