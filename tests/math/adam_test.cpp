#include "stepgraph/math/adam.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "common/random_numbers.hpp"
#include "common/reference_adam.hpp"
#include "math/advanced_group.hpp"

namespace stepgraph {
namespace {

using test::reference_element;
using test::reference_options;

/// The terms that the step would derive for these options.
math::adam_terms terms_of(const reference_options& options) {
  group_settings group;
  group.learning_rate = options.learning_rate;
  group.weight_decay = options.weight_decay;
  group.beta1 = options.beta1;
  group.beta2 = options.beta2;
  group.eps = options.eps;
  group.flags = (options.decoupled ? group_decoupled_weight_decay : 0u) |
                (options.bias_correction ? group_bias_correction : 0u) |
                (options.maximize ? group_maximize : 0u);
  group_progress progress;
  progress.step = options.step - 1;
  return math::finish_group(test::prepared(group, progress),
                            static_cast<float>(options.gradient_factor));
}

/// One update of an element; without AMSGrad its largest second moment stays as it is.
void update(const reference_options& options, float gradient, float& parameter, float& exp_avg,
            float& exp_avg_sq, float& max_exp_avg_sq) {
  math::adam_update(terms_of(options), options.amsgrad, gradient, parameter, exp_avg, exp_avg_sq,
                    max_exp_avg_sq);
}

void expect_near_reference(const reference_options& options, float gradient, float parameter,
                           float exp_avg, float exp_avg_sq, float max_exp_avg_sq) {
  const test::reference_adam reference(options);
  const reference_element before = {parameter, exp_avg, exp_avg_sq, max_exp_avg_sq};
  const reference_element expected = reference.step(gradient, before);
  const reference_element bound = reference.error_bound(gradient, before, expected);
  update(options, gradient, parameter, exp_avg, exp_avg_sq, max_exp_avg_sq);
  ASSERT_NEAR(exp_avg, expected.exp_avg, bound.exp_avg);
  ASSERT_NEAR(exp_avg_sq, expected.exp_avg_sq, bound.exp_avg_sq);
  if (options.amsgrad) {
    ASSERT_NEAR(max_exp_avg_sq, expected.max_exp_avg_sq, bound.max_exp_avg_sq);
  }
  ASSERT_NEAR(parameter, expected.parameter, bound.parameter);
}

struct adam_case {
  const char* name;
  reference_options options;
};

const adam_case adam_cases[] = {
    {"adamw", {.weight_decay = 0.1}},
    {"l2", {.weight_decay = 0.1, .decoupled = false}},
    {"no_bias_correction", {.weight_decay = 0.01, .bias_correction = false}},
    {"maximize", {.weight_decay = 0.1, .maximize = true}},
    {"l2_maximize", {.weight_decay = 0.1, .decoupled = false, .maximize = true}},
    {"scaled", {.weight_decay = 0.1, .gradient_factor = 0x1p-16}},
    {"clipped", {.gradient_factor = 0.3}},
    {"tenth_step", {.weight_decay = 0.1, .step = 10}},
    {"late_step", {.weight_decay = 0.1, .step = 1'000'000}},
    {"large_eps", {.eps = 0.1}},
    {"no_momentum", {.beta1 = 0.0, .beta2 = 0.0}},
    {"long_memory", {.beta1 = 0.99, .beta2 = 0.99999, .step = 3}},
    {"zero_learning_rate", {.learning_rate = 0.0, .weight_decay = 0.1}},
    {"large_learning_rate", {.learning_rate = 10.0, .weight_decay = 0.01}},
    {"amsgrad", {.weight_decay = 0.1, .amsgrad = true, .step = 4}},
    {"amsgrad_l2_maximize",
     {.weight_decay = 0.1, .decoupled = false, .maximize = true, .amsgrad = true}},
};

class AdamUpdate : public ::testing::TestWithParam<adam_case> {};

TEST_P(AdamUpdate, IsWithinRoundingOfFloat64) {
  const reference_options& options = GetParam().options;
  test::integer_generator random(11);
  for (int i = 0; i < 20000 && !HasFatalFailure(); ++i) {
    expect_near_reference(options, random.signed_value(-20, 4), random.signed_value(-8, 3),
                          random.signed_value(-20, 3), random.positive_value(-40, 4),
                          random.positive_value(-40, 4));
  }
}

TEST_P(AdamUpdate, IsWithinRoundingOfFloat64FromFreshMoments) {
  const reference_options& options = GetParam().options;
  test::integer_generator random(12);
  for (int i = 0; i < 20000 && !HasFatalFailure(); ++i) {
    expect_near_reference(options, random.signed_value(-20, 4), random.signed_value(-8, 3), 0.0f,
                          0.0f, 0.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(Options, AdamUpdate, ::testing::ValuesIn(adam_cases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST(AdamUpdateEdges, ZeroGradientAndZeroMomentsLeaveTheParameter) {
  float parameter = 1.5f;
  float exp_avg = 0.0f;
  float exp_avg_sq = 0.0f;
  float largest = 0.0f;
  update({}, 0.0f, parameter, exp_avg, exp_avg_sq, largest);
  EXPECT_EQ(parameter, 1.5f);
  EXPECT_EQ(exp_avg, 0.0f);
  EXPECT_EQ(exp_avg_sq, 0.0f);
}

TEST(AdamUpdateEdges, HugeGradientSaturatesTheSecondMomentAndLaterStepsStayFinite) {
  float parameter = 1.0f;
  float exp_avg = 0.0f;
  float exp_avg_sq = 0.0f;
  float largest = 0.0f;
  update({}, 1e30f, parameter, exp_avg, exp_avg_sq, largest);
  EXPECT_TRUE(std::isfinite(exp_avg_sq));
  for (std::uint64_t step = 2; step < 50; ++step) {
    update({.step = step}, 1.0f, parameter, exp_avg, exp_avg_sq, largest);
    ASSERT_TRUE(std::isfinite(parameter) && std::isfinite(exp_avg) && std::isfinite(exp_avg_sq));
  }
}

TEST(AdamUpdateEdges, NaNGradientReachesTheParameter) {
  float parameter = 1.0f;
  float exp_avg = 0.0f;
  float exp_avg_sq = 0.0f;
  float largest = 0.0f;
  update({}, std::numeric_limits<float>::quiet_NaN(), parameter, exp_avg, exp_avg_sq, largest);
  EXPECT_TRUE(std::isnan(parameter));
}

// A fresh second moment is (1 - beta2) g^2: 1 - 0.999f would be off by 1.3e-5 of it.
TEST(AdamUpdateEdges, SecondMomentKeepsTheAccuracyOfOneMinusBeta2) {
  float parameter = 1.0f;
  float exp_avg = 0.0f;
  float exp_avg_sq = 0.0f;
  float largest = 0.0f;
  update({}, 1.0f, parameter, exp_avg, exp_avg_sq, largest);
  EXPECT_NEAR(exp_avg_sq / 1e-3, 1.0, 1e-7);
}

}  // namespace
}  // namespace stepgraph
