#include "stepgraph/math/schedule.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace stepgraph {
namespace {

double value_at(const schedule_segment& segment, std::uint64_t clock,
                const std::vector<double>& table = {}) {
  return math::value_at(&segment, 1, table.data(), clock);
}

TEST(ScheduleSegments, EachIsActiveFromItsBeginToTheNext) {
  for (std::uint32_t count = 1; count <= 9; ++count) {
    std::vector<schedule_segment> segments(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      segments[i].begin = 3 * i;
      segments[i].from = i;
    }
    for (std::uint64_t clock = 0; clock < 40; ++clock) {
      const double expected = clock < 3 * count ? static_cast<double>(clock / 3) : count - 1;
      EXPECT_EQ(math::value_at(segments.data(), count, nullptr, clock), expected)
          << "segment of " << count << ", clock " << clock;
    }
    const std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
    EXPECT_EQ(math::value_at(segments.data(), count, nullptr, last), count - 1);
  }
}

TEST(ScheduleSegments, TheLocalClockStartsAtTheBegin) {
  const schedule_segment segments[] = {
      {.from = 7.0},
      {.curve = schedule_curve::linear, .begin = 100, .from = 1.0, .to = 2.0, .length = 4.0}};
  EXPECT_EQ(math::value_at(segments, 2, nullptr, 99), 7.0);
  EXPECT_EQ(math::value_at(segments, 2, nullptr, 100), 1.0);
  EXPECT_EQ(math::value_at(segments, 2, nullptr, 101), 1.25);
}

TEST(ScheduleSegments, TheMultiplierScalesEveryCurve) {
  const std::vector<double> table = {1.0, 2.0};
  for (std::uint32_t curve = 0; curve <= static_cast<std::uint32_t>(schedule_curve::table);
       ++curve) {
    schedule_segment segment = {.curve = static_cast<schedule_curve>(curve),
                                .table_count = 2,
                                .period = 3,
                                .from = 5.0,
                                .to = 4.0,
                                .length = 8.0,
                                .ratio = 2.0};
    const double plain = value_at(segment, 2, table);
    segment.multiplier = 0.25;
    EXPECT_EQ(value_at(segment, 2, table), 0.25 * plain);
  }
}

struct curve_case {
  const char* name;
  schedule_curve curve;
  double at_half;  ///< of the way from 3 to 1
};

const curve_case curve_cases[] = {
    {"linear", schedule_curve::linear, 2.0},
    {"rise_cosine", schedule_curve::rise_cosine, 2.0},
    {"anneal_linear", schedule_curve::anneal_linear, 2.0},
    {"anneal_cosine", schedule_curve::anneal_cosine, 2.0},
    {"anneal_exponential", schedule_curve::anneal_exponential, 1.0 + 2.0 * (std::sqrt(2.0) - 1.0)},
    {"anneal_minus_sqrt", schedule_curve::anneal_minus_sqrt, 1.0 + 2.0 * (1.0 - std::sqrt(0.5))},
    {"anneal_polynomial", schedule_curve::anneal_polynomial, 1.25},
};

class Curve : public ::testing::TestWithParam<curve_case> {
 protected:
  static schedule_segment from_3_to_1() {
    return {.curve = GetParam().curve, .from = 3.0, .to = 1.0, .length = 8.0, .ratio = 3.0};
  }
};

TEST_P(Curve, RunsFromItsStartThroughItsMiddleToItsEndAndStaysThere) {
  const schedule_segment segment = from_3_to_1();
  EXPECT_EQ(value_at(segment, 0), 3.0);
  EXPECT_NEAR(value_at(segment, 4), GetParam().at_half, 1e-15);
  EXPECT_EQ(value_at(segment, 8), 1.0);
  EXPECT_EQ(value_at(segment, 9), 1.0);
  EXPECT_EQ(value_at(segment, 1'000'000'000'000), 1.0);
}

TEST_P(Curve, FallsAtEveryStep) {
  for (std::uint64_t clock = 0; clock < 8; ++clock) {
    EXPECT_GT(value_at(from_3_to_1(), clock), value_at(from_3_to_1(), clock + 1));
  }
}

TEST_P(Curve, StartsBeforeOrAfterItsSegment) {
  schedule_segment early = from_3_to_1();
  early.origin = -3.0;
  EXPECT_EQ(value_at(early, 1), value_at(from_3_to_1(), 4));
  schedule_segment late = from_3_to_1();
  late.origin = 3.0;
  EXPECT_EQ(value_at(late, 1), 3.0);
  EXPECT_EQ(value_at(late, 7), value_at(from_3_to_1(), 4));
}

INSTANTIATE_TEST_SUITE_P(Curves, Curve, ::testing::ValuesIn(curve_cases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST(CosineWave, RepeatsWithoutDrift) {
  const schedule_segment segment = {
      .curve = schedule_curve::cosine_wave, .period = 7, .from = 3.0, .to = 1.0};
  for (std::uint64_t clock = 0; clock <= 7; ++clock) {
    const double expected = value_at(segment, clock);
    EXPECT_EQ(value_at(segment, 14 - clock), expected);
    EXPECT_EQ(value_at(segment, 14'000'000'000'000 + clock), expected);
  }
  EXPECT_EQ(value_at(segment, 7), 1.0);
}

TEST(CosineRestarts, StartAgainAfterPeriodsThatGrow) {
  const schedule_segment segment = {
      .curve = schedule_curve::cosine_restarts, .period = 4, .from = 3.0, .to = 1.0, .ratio = 3.0};
  for (const std::uint64_t restart : {0, 4, 16, 52, 160})
    EXPECT_EQ(value_at(segment, restart), 3.0);
  EXPECT_EQ(value_at(segment, 2), 2.0);
  EXPECT_EQ(value_at(segment, 4 + 6), 2.0);
  EXPECT_EQ(value_at(segment, 16 + 18), 2.0);
  EXPECT_LT(value_at(segment, 15), value_at(segment, 14));
}

TEST(InverseSquareRoot, FallsToItsLimitAndNoFurther) {
  const schedule_segment segment = {
      .curve = schedule_curve::inverse_square_root, .from = 6.0, .to = 2.0};
  EXPECT_EQ(value_at(segment, 0), 6.0);
  EXPECT_EQ(value_at(segment, 1), 6.0);
  EXPECT_EQ(value_at(segment, 4), 3.0);
  EXPECT_EQ(value_at(segment, 10), 2.0);
}

TEST(StepDecay, MultipliesAtEveryMultipleOfThePeriod) {
  const schedule_segment segment = {
      .curve = schedule_curve::step_decay, .period = 10, .from = 1.0, .ratio = 0.5};
  EXPECT_EQ(value_at(segment, 9), 1.0);
  EXPECT_EQ(value_at(segment, 10), 0.5);
  EXPECT_EQ(value_at(segment, 29), 0.25);
  EXPECT_EQ(value_at(segment, std::numeric_limits<std::uint64_t>::max()), 0.0);
}

TEST(MilestoneDecay, CountsEveryMilestoneReached) {
  const std::vector<double> table = {99.0, 3.0, 5.0, 5.0, 8.0};
  for (std::uint32_t count = 0; count <= 4; ++count) {
    const schedule_segment segment = {.curve = schedule_curve::milestone_decay,
                                      .table_count = count,
                                      .table_offset = 1,
                                      .from = 1.0,
                                      .ratio = 0.5};
    for (std::uint64_t clock = 0; clock < 12; ++clock) {
      double expected = 1.0;
      for (std::uint32_t i = 1; i <= count; ++i) {
        if (table[i] <= static_cast<double>(clock)) expected *= 0.5;
      }
      EXPECT_EQ(value_at(segment, clock, table), expected) << count << " at " << clock;
    }
  }
}

TEST(TableOfValues, HoldsItsLastEntry) {
  const schedule_segment segment = {
      .curve = schedule_curve::table, .table_count = 3, .table_offset = 1};
  const std::vector<double> table = {9.0, 1.0, 2.0, 3.0, 9.0};
  EXPECT_EQ(value_at(segment, 0, table), 1.0);
  EXPECT_EQ(value_at(segment, 2, table), 3.0);
  EXPECT_EQ(value_at(segment, 3, table), 3.0);
  EXPECT_EQ(value_at(segment, std::numeric_limits<std::uint64_t>::max(), table), 3.0);
}

}  // namespace
}  // namespace stepgraph
