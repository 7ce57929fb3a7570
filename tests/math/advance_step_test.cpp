#include "stepgraph/math/advance_step.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "math/advanced_group.hpp"
#include "stepgraph/math/bias_correction.hpp"

namespace stepgraph {
namespace {

TEST(IntegerPower, IsWithinOneRoundingAFactor) {
  for (const double base : {0.0, 0.5, 0.9, 0.95, 0.999, 0.9999, 1.0}) {
    for (const std::uint64_t exponent : {0ull, 1ull, 2ull, 3ull, 7ull, 10ull, 64ull, 1000ull,
                                         65537ull, 1'000'000ull, 1ull << 40}) {
      const long double expected =
          std::pow(static_cast<long double>(base), static_cast<long double>(exponent));
      const double power = math::integer_power(base, exponent);
      const long double tolerance = expected * 0x1p-53L * static_cast<long double>(exponent + 1) +
                                    std::numeric_limits<double>::min();
      EXPECT_LE(std::abs(power - expected), tolerance) << base << "^" << exponent;
    }
  }
  EXPECT_EQ(math::integer_power(0.0, 0), 1.0);
  EXPECT_EQ(math::integer_power(0.5, 10), 0x1p-10);
}

TEST(BiasCorrection, IsOneMinusThePower) {
  for (const double beta : {0.0, 0.9, 0.999, 0.99999}) {
    for (const std::uint64_t step : {1ull, 2ull, 10ull, 1000ull, 1'000'000ull}) {
      const auto expected = static_cast<double>(
          1.0L - std::pow(static_cast<long double>(beta), static_cast<long double>(step)));
      EXPECT_NEAR(math::bias_correction(beta, step) / expected, 1.0, 1e-11) << beta << " " << step;
    }
  }
}

/// The terms of update number `step` of a group.
math::adam_terms terms_at(group_settings group, std::uint64_t step) {
  group_progress progress;
  progress.step = step - 1;
  return test::advance(group, progress);
}

TEST(PreparedGroup, A17_CorrectedSecondMomentIsAccurateAtEveryStep) {
  for (const std::uint64_t step : {1ull, 2ull, 10ull, 1000ull, 1'000'000ull}) {
    for (const double beta2 : {0.95, 0.999, 0.9999}) {
      group_settings group;
      group.beta2 = beta2;
      const math::adam_terms terms = terms_at(group, step);
      for (const float exp_avg_sq : {1e-3f, 2.5e-9f, 7.0f}) {
        const float root = math::square_root(exp_avg_sq) * terms.inverse_sqrt_bias2;
        const double v_hat = static_cast<double>(root) * root;
        const double expected = exp_avg_sq / (1.0 - std::pow(beta2, static_cast<double>(step)));
        EXPECT_LT(std::abs(v_hat / expected - 1.0), 1e-6) << step << " " << beta2;
      }
    }
  }
}

TEST(PreparedGroup, A17_SecondMomentOfAConstantGradientCorrectsToItsSquare) {
  const group_settings group;
  group_progress progress;
  float parameter = 1.0f;
  float exp_avg = 0.0f;
  float exp_avg_sq = 0.0f;
  float largest = 0.0f;
  for (int step = 1; step <= 10; ++step) {
    const math::adam_terms terms = test::advance(group, progress);
    math::adam_update(terms, false, 3.0f, parameter, exp_avg, exp_avg_sq, largest);
    const double root = math::square_root(exp_avg_sq) * terms.inverse_sqrt_bias2;
    EXPECT_LT(std::abs(root * root / 9.0 - 1.0), 1e-6) << step;
  }
}

TEST(PreparedGroup, CountsItsStepAndRemembersTheLearningRate) {
  group_settings group;
  group.learning_rate = 0.25;
  group_progress progress;
  for (std::uint64_t step = 1; step <= 3; ++step) {
    test::advance(group, progress);
    EXPECT_EQ(progress.step, step);
    EXPECT_EQ(progress.learning_rate, 0.25);
  }
}

/// From one to zero in four updates.
const schedule_segment falling = {
    .curve = schedule_curve::anneal_linear, .from = 1.0, .to = 0.0, .length = 4.0};
const schedule_tables falling_tables = {&falling, nullptr};

TEST(PreparedGroup, ScheduleClockIsTheNumberOfUpdatesBeforeThisOne) {
  group_settings group;
  group.learning_rate = 100.0;
  group.learning_rate_schedule = {.count = 1};
  group_progress progress;
  for (const double expected : {1.0, 0.75, 0.5, 0.25, 0.0, 0.0}) {
    test::advance(group, progress, {}, falling_tables);
    EXPECT_EQ(progress.learning_rate, expected);
  }
}

TEST(PreparedGroup, WeightDecayGoesToOneOfTheTwoModes) {
  group_settings group;
  group.learning_rate = 0.5;
  group.weight_decay = 0.25;
  math::adam_terms terms = terms_at(group, 1);
  EXPECT_EQ(terms.decoupled_shrinkage, 0.125f);
  EXPECT_EQ(terms.l2_weight_decay, 0.0f);
  group.flags &= ~static_cast<std::uint32_t>(group_decoupled_weight_decay);
  terms = terms_at(group, 1);
  EXPECT_EQ(terms.decoupled_shrinkage, 0.0f);
  EXPECT_EQ(terms.l2_weight_decay, 0.25f);
}

TEST(PreparedGroup, GradientScaleJoinsLossScaleClipAndDirection) {
  group_settings group;
  group_progress progress;
  step_settings step;
  step.max_grad_norm = 1.0;
  step_scalars scalars;
  scalars.next_loss_scale.scale = 8.0f;
  test::advance(step, {.total = 256.0, .zeros = 0, .measured = 1}, scalars);
  EXPECT_EQ(scalars.gradient_scale, static_cast<float>(1.0 / (2.0 + 1e-6) * 0.125));
  scalars.gradient_scale = 0.0625f;
  EXPECT_EQ(test::advance(group, progress, scalars).gradient_scale, 0.0625f);
  group.flags |= group_maximize;
  EXPECT_EQ(test::advance(group, progress, scalars).gradient_scale, -0.0625f);
}

TEST(PreparedGroup, WithoutBiasCorrectionTheTermsAreTheSettings) {
  group_settings group;
  group.learning_rate = 0.5;
  group.flags &= ~static_cast<std::uint32_t>(group_bias_correction);
  const math::adam_terms terms = terms_at(group, 1);
  EXPECT_EQ(terms.step_size, 0.5f);
  EXPECT_EQ(terms.inverse_sqrt_bias2, 1.0f);
}

TEST(FinishedStep, FiniteGradientAdvancesTheStep) {
  step_settings settings;
  settings.max_grad_norm = 1.0;
  step_scalars scalars;
  scalars.next_loss_scale.scale = 4.0f;
  test::advance(settings, {.total = 64.0, .zeros = 9, .measured = 1}, scalars);
  EXPECT_EQ(scalars.step, 1u);
  EXPECT_EQ(scalars.skipped, 0u);
  EXPECT_EQ(scalars.skip, 0u);
  EXPECT_EQ(scalars.found_inf, 0u);
  EXPECT_EQ(scalars.grad_norm, 2.0);
  EXPECT_EQ(scalars.loss_scale, 4.0f);
  EXPECT_EQ(scalars.inverse_scale, 0.25f);
  EXPECT_EQ(scalars.clip_coefficient, static_cast<float>(1.0 / (2.0 + 1e-6)));
  // Not the product of the two rounded numbers.
  EXPECT_EQ(scalars.gradient_scale, static_cast<float>(1.0 / (2.0 + 1e-6) * 0.25));
  EXPECT_EQ(scalars.zeros, 9u);
  EXPECT_EQ(scalars.launches, 1u);
}

TEST(FinishedStep, NonFiniteGradientSkipsTheStep) {
  step_scalars scalars;
  scalars.step = 7;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  step_settings settings;
  settings.skip_non_finite = 1;
  test::advance(settings, {.total = nan, .zeros = 0, .measured = 1}, scalars);
  EXPECT_EQ(scalars.step, 7u);
  EXPECT_EQ(scalars.skipped, 1u);
  EXPECT_NE(scalars.skip, 0u);
  EXPECT_NE(scalars.found_inf, 0u);
  EXPECT_EQ(scalars.grad_norm, std::numeric_limits<double>::infinity());
  test::advance(settings, {.total = 1.0, .zeros = 0, .measured = 1}, scalars);
  EXPECT_EQ(scalars.step, 8u);
  EXPECT_EQ(scalars.skip, 0u);
  EXPECT_EQ(scalars.found_inf, 0u);
}

TEST(FinishedStep, UnmeasuredGradientIsNotClipped) {
  step_settings settings;
  settings.max_grad_norm = 1.0;
  step_scalars scalars;
  test::advance(settings, {}, scalars);
  EXPECT_EQ(scalars.step, 1u);
  EXPECT_EQ(scalars.clip_coefficient, 1.0f);
  EXPECT_EQ(scalars.grad_norm, 0.0);
}

TEST(FinishedStep, ZeroGradientClipsToOneWithoutNaN) {
  step_settings settings;
  settings.max_grad_norm = 1.0;
  step_scalars scalars;
  test::advance(settings, {.total = 0.0, .zeros = 0, .measured = 1}, scalars);
  EXPECT_EQ(scalars.clip_coefficient, 1.0f);
  EXPECT_EQ(scalars.grad_norm, 0.0);
}

TEST(ApplySetting, ChangesTheNamedGroupFieldAndNothingElse) {
  struct field_case {
    setting_field field;
    double group_settings::*member;
  };
  for (const field_case tested :
       {field_case{setting_field::learning_rate, &group_settings::learning_rate},
        field_case{setting_field::weight_decay, &group_settings::weight_decay},
        field_case{setting_field::beta1, &group_settings::beta1},
        field_case{setting_field::beta2, &group_settings::beta2},
        field_case{setting_field::eps, &group_settings::eps}}) {
    group_settings changed;
    group_progress progress;
    progress.step = 5;
    math::apply_setting(changed, progress, tested.field, 0.75);
    EXPECT_EQ(changed.*tested.member, 0.75);
    changed.*tested.member = group_settings{}.*tested.member;
    EXPECT_EQ(changed.learning_rate, group_settings{}.learning_rate);
    EXPECT_EQ(changed.weight_decay, group_settings{}.weight_decay);
    EXPECT_EQ(changed.beta1, group_settings{}.beta1);
    EXPECT_EQ(changed.beta2, group_settings{}.beta2);
    EXPECT_EQ(changed.eps, group_settings{}.eps);
    EXPECT_EQ(progress.step, 5u);
  }
}

TEST(ApplySetting, LearningRateHoldsTheScheduleUntilItResumes) {
  group_settings group;
  group.learning_rate_schedule = {.count = 1};
  group_progress progress;
  const auto next_learning_rate = [&] {
    test::advance(group, progress, {}, falling_tables);
    return progress.learning_rate;
  };
  EXPECT_EQ(next_learning_rate(), 1.0);
  math::apply_setting(group, progress, setting_field::learning_rate, 9.0);
  EXPECT_EQ(next_learning_rate(), 9.0);
  math::apply_setting(group, progress, setting_field::resume_learning_rate, 0.0);
  EXPECT_EQ(next_learning_rate(), 0.5);
}

TEST(ApplySetting, GroupStepMovesTheClock) {
  group_settings group;
  group_progress progress;
  math::apply_setting(group, progress, setting_field::group_step, 41.0);
  test::advance(group, progress);
  EXPECT_EQ(progress.step, 42u);
}

TEST(ApplySetting, ChangesTheFieldsOfTheWholeStep) {
  step_settings settings;
  step_scalars scalars;
  const auto apply = [&](setting_field field, double value) {
    math::apply_setting(settings, scalars, field, value);
  };
  apply(setting_field::loss_scale, 1024.0);
  EXPECT_EQ(scalars.next_loss_scale.scale, 1024.0f);
  apply(setting_field::growth_tracker, 5.0);
  EXPECT_EQ(scalars.next_loss_scale.growth_tracker, 5u);
  apply(setting_field::hysteresis_left, -3.0);
  EXPECT_EQ(scalars.next_loss_scale.hysteresis_left, -3);
  apply(setting_field::max_grad_norm, 2.0);
  EXPECT_EQ(settings.max_grad_norm, 2.0);
  apply(setting_field::skip_above_norm, 3.0);
  EXPECT_EQ(settings.skip_above_norm, 3.0);
  apply(setting_field::samples_per_step, 64.0);
  EXPECT_EQ(settings.samples_per_step, 64u);
  apply(setting_field::step, 12.0);
  EXPECT_EQ(scalars.step, 12u);
  apply(setting_field::skipped, 13.0);
  EXPECT_EQ(scalars.skipped, 13u);
  apply(setting_field::samples, 14.0);
  EXPECT_EQ(scalars.samples, 14u);
  EXPECT_EQ(scalars.launches, 0u);
  EXPECT_EQ(scalars.loss_scale, 1.0f) << "the scale of a step that has not been made";
}

TEST(ApplySetting, IgnoresFieldsOfTheOtherKind) {
  group_settings group;
  group_progress progress;
  math::apply_setting(group, progress, setting_field::loss_scale, 3.0);
  math::apply_setting(group, progress, setting_field::step, 3.0);
  EXPECT_EQ(group.learning_rate, group_settings{}.learning_rate);
  EXPECT_EQ(progress.step, 0u);
  step_settings settings;
  step_scalars scalars;
  math::apply_setting(settings, scalars, setting_field::learning_rate, 3.0);
  EXPECT_EQ(settings.max_grad_norm, 0.0);
  EXPECT_EQ(scalars.next_loss_scale.scale, 1.0f);
  EXPECT_EQ(scalars.step, 0u);
}

}  // namespace
}  // namespace stepgraph
