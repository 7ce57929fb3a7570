#include "stepgraph/schedule.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "common/expect_error.hpp"
#include "common/expect_schedule.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

schedule line(double from, double to, double length) {
  return {.segments = {{.curve = schedule_curve::linear, .from = from, .to = to, .length = length}},
          .table = {}};
}

TEST(Schedule, ConstantIsTheSameAtEveryClock) {
  const schedule tested = schedules::constant(0.25, schedule_clock::samples);
  EXPECT_EQ(tested.clock, schedule_clock::samples);
  EXPECT_EQ(value_at(tested, 0), 0.25);
  EXPECT_EQ(value_at(tested, std::numeric_limits<std::uint64_t>::max()), 0.25);
}

TEST(Schedule, TableHoldsAnyFunctionOfTheClock) {
  // A LambdaLR: base learning rate times the caller's factor.
  std::vector<double> factors(100'001);
  std::vector<double> expected;
  for (std::size_t n = 0; n < factors.size(); ++n) {
    factors[n] = 1.0 / (1.0 + std::sin(static_cast<double>(n)) * 0.5);
    expected.push_back(0.02 * factors[n]);
  }
  const schedule tested = schedules::scaled(schedules::table(factors), 0.02);
  expect_schedule(tested, expected);
  EXPECT_EQ(value_at(tested, 100'001), expected.back());
}

TEST(Schedule, ScaledMultipliesEveryValue) {
  const schedule plain = line(3.0, 1.0, 8.0);
  const schedule half = schedules::scaled(schedules::scaled(plain, 0.25), 2.0);
  for (std::uint64_t n = 0; n < 12; ++n) EXPECT_EQ(value_at(half, n), 0.5 * value_at(plain, n));
}

TEST(Schedule, ComparesByValue) {
  EXPECT_EQ(schedules::table({1.0, 2.0}), schedules::table({1.0, 2.0}));
  EXPECT_NE(schedules::table({1.0, 2.0}), schedules::table({1.0, 3.0}));
  EXPECT_NE(schedules::constant(1.0), schedules::constant(2.0));
  EXPECT_NE(schedules::constant(1.0), schedules::constant(1.0, schedule_clock::samples));
}

TEST(ScheduleSequence, EachPartStartsItsOwnClockAtItsMilestone) {
  const schedule tested = schedules::sequence(
      {schedules::table({1.0, 2.0, 3.0}), line(10.0, 20.0, 10.0), schedules::table({7.0, 8.0})},
      {2, 5});
  const double expected[] = {1.0, 2.0, 10.0, 11.0, 12.0, 7.0, 8.0, 8.0};
  for (std::uint64_t n = 0; n < 8; ++n) EXPECT_EQ(value_at(tested, n), expected[n]) << n;
  validate(tested);
}

TEST(ScheduleSequence, OfSequencesIsASequence) {
  const schedule inner = schedules::sequence(
      {schedules::constant(1.0), schedules::constant(2.0), schedules::constant(3.0)}, {2, 50});
  const schedule tested = schedules::sequence({inner, schedules::scaled(inner, 10.0)}, {4});
  const double expected[] = {1.0, 1.0, 2.0, 2.0, 10.0, 10.0, 20.0};
  for (std::uint64_t n = 0; n < 7; ++n) EXPECT_EQ(value_at(tested, n), expected[n]) << n;
  EXPECT_EQ(value_at(tested, 54), 30.0);
}

TEST(ScheduleSequence, KeepsTheClockOfItsParts) {
  const schedule samples = schedules::constant(1.0, schedule_clock::samples);
  EXPECT_EQ(schedules::sequence({samples, samples}, {3}).clock, schedule_clock::samples);
  expect_error<usage_error>(
      [&] {
        schedules::sequence({samples, schedules::constant(1.0)}, {3});
      },
      {"sequence", "part 1"});
}

TEST(ScheduleSequence, OfOnePartIsThatPart) {
  const schedule part = schedules::table({1.0, 2.0});
  EXPECT_EQ(schedules::sequence({part}, {}), part);
}

TEST(ScheduleRefusals, SequenceNamesWhatIsWrong) {
  const schedule one = schedules::constant(1.0);
  const auto refuse = [](const std::vector<schedule>& parts,
                         const std::vector<std::uint64_t>& milestones,
                         const std::vector<std::string>& words) {
    expect_error<usage_error>([&] { schedules::sequence(parts, milestones); }, words);
  };
  refuse({}, {}, {"sequence", "no parts"});
  refuse({one, one}, {}, {"sequence", "0 milestones", "1"});
  refuse({one}, {4}, {"sequence", "1 milestones", "0"});
  refuse({one, one, one}, {5, 4}, {"sequence", "milestone 1", "4", "5"});
  refuse({one, one, one}, {5, 5}, {"sequence", "milestone 1", "5"});
  refuse({one, one}, {0}, {"sequence", "milestone 0", "0"});
  refuse({one, schedule{}}, {3}, {"no segments"});
}

TEST(ScheduleRefusals, NumbersThatAreNegativeOrNotFinite) {
  for (const double wrong : {-1.0, nan, infinity}) {
    expect_error<usage_error>([&] { schedules::constant(wrong); }, {"constant", "value"});
    expect_error<usage_error>([&] { schedules::table({1.0, wrong}); }, {"table", "values[1]"});
    expect_error<usage_error>([&] { schedules::scaled(schedules::constant(1.0), wrong); },
                              {"scaled", "multiplier"});
  }
  expect_error<usage_error>([] { schedules::table({}); }, {"table", "values", "0"});
}

TEST(ScheduleRefusals, AnEmptyScheduleHasNoValue) {
  expect_error<usage_error>([] { value_at(schedule{}, 0); }, {"no segments"});
  expect_error<usage_error>([] { validate(schedule{}); }, {"no segments"});
}

struct bad_schedule {
  const char* name;
  std::function<void(schedule&)> bend;  ///< a table, then from clock 5 a line
  std::vector<std::string> words;
};

const bad_schedule bad_schedules[] = {
    {"first_begins_late",
     [](schedule& s) { s.segments[0].begin = 1; },
     {"segment 0", "begin", "1"}},
    {"out_of_order", [](schedule& s) { s.segments[1].begin = 0; }, {"segment 1", "begin", "0"}},
    {"begin_too_large",
     [](schedule& s) { s.segments[1].begin = ~std::uint64_t{0}; },
     {"segment 1", "begin", "2^53"}},
    {"unknown_curve",
     [](schedule& s) { s.segments[1].curve = static_cast<schedule_curve>(99); },
     {"segment 1", "curve", "99"}},
    {"no_length", [](schedule& s) { s.segments[1].length = 0.0; }, {"segment 1", "length", "0"}},
    {"length_backwards",
     [](schedule& s) { s.segments[1].length = -1.0; },
     {"segment 1", "length", "-1"}},
    {"from_not_a_number", [](schedule& s) { s.segments[1].from = nan; }, {"segment 1", "from"}},
    {"to_infinite", [](schedule& s) { s.segments[1].to = infinity; }, {"segment 1", "to", "inf"}},
    {"origin_infinite", [](schedule& s) { s.segments[1].origin = infinity; }, {"origin", "inf"}},
    {"multiplier_negative",
     [](schedule& s) { s.segments[1].multiplier = -2.0; },
     {"segment 1", "multiplier", "-2"}},
    {"no_period",
     [](schedule& s) { s.segments[1].curve = schedule_curve::cosine_wave; },
     {"segment 1", "period", "0"}},
    {"restarts_that_shrink",
     [](schedule& s) {
       s.segments[1].curve = schedule_curve::cosine_restarts;
       s.segments[1].period = 4;
       s.segments[1].ratio = 0.5;
     },
     {"segment 1", "ratio", "0.5"}},
    {"no_entries", [](schedule& s) { s.segments[0].table_count = 0; }, {"segment 0", "table"}},
    {"entries_past_the_table",
     [](schedule& s) { s.segments[0].table_offset = 2; },
     {"segment 0", "table[2]", "3"}},
    {"offset_past_the_table",
     [](schedule& s) { s.segments[0].table_offset = ~std::uint64_t{0}; },
     {"segment 0", "table["}},
    {"negative_entry", [](schedule& s) { s.table[1] = -4.0; }, {"segment 0", "entry[1]", "-4"}},
    {"milestones_that_fall",
     [](schedule& s) { s.segments[0].curve = schedule_curve::milestone_decay; },
     {"segment 0", "milestone"}},
};

class BadSchedule : public ::testing::TestWithParam<bad_schedule> {};

TEST_P(BadSchedule, IsRefusedByValidate) {
  schedule tested =
      schedules::sequence({schedules::table({3.0, 2.0, 1.0}), line(1.0, 2.0, 4.0)}, {5});
  validate(tested);
  GetParam().bend(tested);
  expect_error<usage_error>([&] { validate(tested); }, GetParam().words);
}

INSTANTIATE_TEST_SUITE_P(Bends, BadSchedule, ::testing::ValuesIn(bad_schedules),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace stepgraph::test
