#include "stepgraph/megatron_schedules.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "common/expect_error.hpp"
#include "common/expect_schedule.hpp"
#include "common/reference_megatron_schedule.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::test {
namespace {

using schedules::megatron_learning_rate;
using schedules::megatron_learning_rate_options;
using schedules::megatron_weight_decay;
using schedules::megatron_weight_decay_options;
using schedules::megatron_wsd_style;
using rate_style = schedules::megatron_learning_rate_style;
using decay_style = schedules::megatron_weight_decay_style;

constexpr std::uint64_t clocks = 100'001;

struct span_case {
  const char* name;
  std::uint64_t warmup, decay, wsd_decay;
  double initial, maximum, minimum;
};

constexpr span_case spans[] = {
    {"long", 2000, 90'000, 9000, 0.0, 3e-4, 3e-5},
    {"to_zero", 1000, 40'000, 8000, 1e-7, 6e-4, 0.0},
    {"no_warmup", 0, 99'999, 99'999, 0.0, 1e-3, 1e-5},
    {"warmup_of_one", 1, 2, 1, 1e-5, 1e-3, 1e-4},
    {"decay_of_one", 0, 1, 1, 0.0, 1e-3, 1e-4},
    {"wsd_decay_reaches_into_warmup", 500, 1000, 700, 0.0, 2e-3, 1e-5},
    {"wsd_decay_began_before_the_first_clock", 10, 1000, 1500, 0.0, 2e-3, 1e-5},
    {"beyond_the_last_clock", 30'000, 400'000'000, 320'000'000, 0.0, 1.5e-4, 1e-5},
    {"rising", 100, 5000, 500, 1e-2, 1e-4, 1e-3},
};

class MegatronLearningRate
    : public ::testing::TestWithParam<std::tuple<span_case, rate_style, megatron_wsd_style>> {
 protected:
  static megatron_learning_rate_options options() {
    const auto& [span, style, wsd_style] = GetParam();
    return {.style = style,
            .initial = span.initial,
            .maximum = span.maximum,
            .minimum = span.minimum,
            .warmup = span.warmup,
            .decay = span.decay,
            .wsd_style = wsd_style,
            .wsd_decay = span.wsd_decay};
  }
};

TEST_P(MegatronLearningRate, FollowsItsRuleAtEveryClock) {
  std::vector<double> expected(clocks);
  for (std::uint64_t n = 0; n < clocks; ++n) expected[n] = reference_learning_rate(options(), n);
  expect_schedule(megatron_learning_rate(options()), expected);
}

TEST_P(MegatronLearningRate, FollowsItsRuleAroundTheEndOfTheDecay) {
  const schedule tested = megatron_learning_rate(options());
  for (std::uint64_t n = options().decay - 1; n <= options().decay + 2; ++n) {
    EXPECT_LE(f32_steps_between(value_at(tested, n), reference_learning_rate(options(), n)), 1)
        << n << ": " << value_at(tested, n) << ", expected "
        << reference_learning_rate(options(), n);
  }
}

std::string name_of_case(
    const ::testing::TestParamInfo<std::tuple<span_case, rate_style, megatron_wsd_style>>& info) {
  const auto& [span, style, wsd_style] = info.param;
  const char* styles[] = {"constant", "linear", "cosine", "inverse_square_root", "wsd"};
  const char* wsd_styles[] = {"linear", "cosine", "exponential", "minus_sqrt"};
  std::string name = std::string(span.name) + "_" + styles[static_cast<int>(style)];
  if (style == rate_style::wsd) name += std::string("_") + wsd_styles[static_cast<int>(wsd_style)];
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    Styles, MegatronLearningRate,
    ::testing::Combine(::testing::ValuesIn(spans),
                       ::testing::Values(rate_style::constant, rate_style::linear,
                                         rate_style::cosine, rate_style::inverse_square_root),
                       ::testing::Values(megatron_wsd_style::linear)),
    name_of_case);
INSTANTIATE_TEST_SUITE_P(WarmupStableDecay, MegatronLearningRate,
                         ::testing::Combine(::testing::ValuesIn(spans),
                                            ::testing::Values(rate_style::wsd),
                                            ::testing::Values(megatron_wsd_style::linear,
                                                              megatron_wsd_style::cosine,
                                                              megatron_wsd_style::exponential,
                                                              megatron_wsd_style::minus_sqrt)),
                         name_of_case);

TEST(MegatronSchedules, CountSamplesUnlessToldOtherwise) {
  EXPECT_EQ(megatron_learning_rate({.maximum = 1.0, .decay = 1}).clock, schedule_clock::samples);
  EXPECT_EQ(
      megatron_learning_rate({.maximum = 1.0, .decay = 1, .clock = schedule_clock::updates}).clock,
      schedule_clock::updates);
  EXPECT_EQ(megatron_weight_decay({.start = 0.1, .end = 0.1}).clock, schedule_clock::samples);
}

TEST(MegatronSchedules, ConstantNeedsNoDecay) {
  const schedule tested = megatron_learning_rate(
      {.style = rate_style::constant, .initial = 1.0, .maximum = 3.0, .warmup = 4});
  EXPECT_EQ(value_at(tested, 0), 1.0);
  EXPECT_EQ(value_at(tested, 2), 2.0);
  EXPECT_EQ(value_at(tested, 1'000'000), 3.0);
}

class MegatronWeightDecay : public ::testing::TestWithParam<decay_style> {};

TEST_P(MegatronWeightDecay, FollowsItsRuleAtEveryClock) {
  for (const std::uint64_t increment : {1, 2, 777, 50'000, 100'000, 300'000}) {
    for (const double start : {0.0, 0.033, 0.1}) {
      for (const double multiplier : {1.0, 0.0, 0.37}) {
        const bool constant = GetParam() == decay_style::constant;
        const megatron_weight_decay_options options = {.style = GetParam(),
                                                       .start = constant ? 0.1 : start,
                                                       .end = 0.1,
                                                       .increment = increment,
                                                       .multiplier = multiplier};
        std::vector<double> expected(clocks);
        for (std::uint64_t n = 0; n < clocks; ++n) expected[n] = reference_weight_decay(options, n);
        SCOPED_TRACE(::testing::Message() << increment << " from " << start << " * " << multiplier);
        expect_schedule(megatron_weight_decay(options), expected);
      }
    }
  }
}

std::string name_of_style(const ::testing::TestParamInfo<decay_style>& info) {
  const char* names[] = {"constant", "linear", "cosine"};
  return names[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Styles, MegatronWeightDecay,
                         ::testing::Values(decay_style::constant, decay_style::linear,
                                           decay_style::cosine),
                         name_of_style);

void expect_refusal(const megatron_learning_rate_options& options, std::vector<std::string> words) {
  words.emplace_back("megatron_learning_rate");
  expect_error<usage_error>([&] { megatron_learning_rate(options); }, words);
}

TEST(MegatronRefusals, LearningRateNamesTheOption) {
  const double infinity = std::numeric_limits<double>::infinity();
  expect_refusal({.decay = 10}, {"maximum", "nan"});
  expect_refusal({.maximum = infinity, .decay = 10}, {"maximum", "inf"});
  expect_refusal({.initial = -1.0, .maximum = 1.0, .decay = 10}, {"initial", "-1"});
  expect_refusal({.maximum = 1.0, .minimum = -2.0, .decay = 10}, {"minimum", "-2"});
  expect_refusal({.maximum = 1.0}, {"decay", "0"});
  expect_refusal({.maximum = 1.0, .warmup = 10, .decay = 10}, {"decay", "10", "warmup"});
  expect_refusal({.maximum = 1.0, .warmup = 10, .decay = 9}, {"decay", "9", "10", "warmup"});
  expect_refusal({.maximum = 1.0, .warmup = ~std::uint64_t{0}, .decay = 9}, {"warmup", "2^53"});
  expect_refusal({.style = rate_style::wsd, .maximum = 1.0, .decay = 9}, {"wsd_decay", "0"});
  expect_refusal({.style = static_cast<rate_style>(9), .maximum = 1.0, .decay = 9}, {"style", "9"});
  expect_refusal({.style = rate_style::wsd,
                  .maximum = 1.0,
                  .decay = 9,
                  .wsd_style = static_cast<megatron_wsd_style>(8),
                  .wsd_decay = 2},
                 {"wsd_style", "8"});
}

void expect_refusal(const megatron_weight_decay_options& options, std::vector<std::string> words) {
  words.emplace_back("megatron_weight_decay");
  expect_error<usage_error>([&] { megatron_weight_decay(options); }, words);
}

TEST(MegatronRefusals, WeightDecayNamesTheOption) {
  expect_refusal(megatron_weight_decay_options{.end = 0.1}, {"start", "nan"});
  expect_refusal(megatron_weight_decay_options{.start = 0.1}, {"end", "nan"});
  expect_refusal(megatron_weight_decay_options{.start = 0.1, .end = 0.2},
                 {"end", "0.2", "0.1", "constant"});
  expect_refusal(
      megatron_weight_decay_options{.style = decay_style::linear, .start = 0.1, .end = 0.2},
      {"increment", "0"});
  expect_refusal(megatron_weight_decay_options{.start = 0.1, .end = 0.1, .multiplier = -1.0},
                 {"multiplier", "-1"});
  expect_refusal(
      megatron_weight_decay_options{
          .style = static_cast<decay_style>(7), .start = 0.1, .end = 0.1, .increment = 1},
      {"style", "7"});
}

}  // namespace
}  // namespace stepgraph::test
