#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "math/advanced_group.hpp"

// What decides on skipping, clipping and the loss scale, and what moves with the decision.
namespace stepgraph {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

gradient_statistics measured(double total) { return {total, 0, 1}; }

TEST(PrepareStep, AnythingButExactZeroInTheInputIsFoundInf) {
  for (const float input : {0.0f, -0.0f}) {
    step_settings settings;
    settings.found_inf_input = &input;
    EXPECT_EQ(math::prepare_step(settings, {}).found_inf, 0u);
  }
  for (const float input :
       {1.0f, 2.0f, 8.0f, 0.5f, -1.0f, 0x1p-149f, std::numeric_limits<float>::quiet_NaN()}) {
    step_settings settings;
    settings.found_inf_input = &input;
    EXPECT_EQ(math::prepare_step(settings, {}).found_inf, 1u) << input;
  }
}

TEST(PrepareStep, ScaleIsTheInputsOrElseTheStepsOwn) {
  step_settings settings;
  step_scalars scalars;
  scalars.next_loss_scale.scale = 8.0f;
  EXPECT_EQ(math::prepare_step(settings, scalars).loss_scale, 8.0f);
  EXPECT_EQ(math::prepare_step(settings, scalars).inverse_scale, 0.125);
  const float input = 3.0f;
  settings.loss_scale_input = &input;
  EXPECT_EQ(math::prepare_step(settings, scalars).loss_scale, 3.0f);
  EXPECT_EQ(math::prepare_step(settings, scalars).inverse_scale, 1.0 / 3.0);
}

TEST(PreparedGroup, InputsComeBeforeHandAndSchedule) {
  const float learning_rate = 0.25f;
  const float weight_decay = 0.5f;
  group_settings group;
  const schedule_segment segment = {.from = 2.0};
  const schedule_tables tables = {&segment, nullptr};
  group.learning_rate_schedule = {.count = 1};
  group.weight_decay_schedule = {.count = 1};
  group_progress progress;
  EXPECT_EQ(math::next_learning_rate(group, progress, tables, 0), 2.0);
  EXPECT_EQ(math::next_weight_decay(group, progress, tables, 0), 2.0);
  math::apply_setting(group, progress, setting_field::learning_rate, 3.0);
  math::apply_setting(group, progress, setting_field::weight_decay, 4.0);
  EXPECT_EQ(math::next_learning_rate(group, progress, tables, 0), 3.0);
  EXPECT_EQ(math::next_weight_decay(group, progress, tables, 0), 4.0);
  group.learning_rate_input = &learning_rate;
  group.weight_decay_input = &weight_decay;
  EXPECT_EQ(math::next_learning_rate(group, progress, tables, 0), 0.25);
  EXPECT_EQ(math::next_weight_decay(group, progress, tables, 0), 0.5);
  test::advance(group, progress);
  EXPECT_EQ(progress.learning_rate, 0.25);
  EXPECT_EQ(progress.weight_decay, 0.5);
}

TEST(FinishedStep, NormIsTheRootOfTheSumOrTheLargestMagnitudeUnscaled) {
  EXPECT_EQ(math::norm_of_total(norm_kind::l2, 25.0, 0.5), 2.5);
  EXPECT_EQ(math::norm_of_total(norm_kind::infinity, 25.0, 0.5), 12.5);
  for (const double bad : {infinity, -infinity, nan}) {
    EXPECT_EQ(math::norm_of_total(norm_kind::l2, bad, 0.5), infinity);
    EXPECT_EQ(math::norm_of_total(norm_kind::infinity, bad, 0.5), infinity);
  }
}

TEST(CombinedTotal, AddsSquaresAndTakesTheLargestMagnitude) {
  const double totals[] = {9.0, 0.0, 16.0};
  EXPECT_EQ(math::combined_total(totals, 3, norm_kind::l2), 25.0);
  EXPECT_EQ(math::combined_total(totals, 3, norm_kind::infinity), 16.0);
  EXPECT_EQ(math::combined_total(totals, 2, norm_kind::infinity), 9.0);
  EXPECT_EQ(math::combined_total(totals, 0, norm_kind::l2), 0.0);
  EXPECT_EQ(math::combined_total(totals, 0, norm_kind::infinity), 0.0);
}

TEST(CombinedTotal, OneThatIsNotFiniteMakesTheWholeSoWhereverItIs) {
  for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
    for (const double bad : {nan, -nan, infinity}) {
      for (std::size_t position = 0; position < 4; ++position) {
        std::vector<double> totals = {1.0, 1e300, 0.0, 7.0};
        totals[position] = bad;
        EXPECT_FALSE(math::is_finite(math::combined_total(totals.data(), 4, norm)))
            << bad << " at " << position;
        // Nor does a second one hide the first.
        totals[(position + 2) % 4] = infinity;
        EXPECT_FALSE(math::is_finite(math::combined_total(totals.data(), 4, norm)));
      }
    }
  }
}

TEST(FinishedStep, NormAboveTheThresholdSkipsAndLeavesTheLossScaleItsFiniteStep) {
  step_settings settings;
  settings.skip_above_norm = 5.0;
  settings.samples_per_step = 32;
  settings.scaling.rule = loss_scale_rule::torch_amp;
  step_scalars scalars;
  test::advance(settings, measured(25.0), scalars);
  EXPECT_EQ(scalars.skip, 0u) << "a norm of just the threshold";
  EXPECT_EQ(scalars.samples, 32u);
  test::advance(settings, measured(26.0), scalars);
  EXPECT_EQ(scalars.skip, 1u);
  EXPECT_EQ(scalars.found_inf, 0u);
  EXPECT_EQ(scalars.step, 1u);
  EXPECT_EQ(scalars.skipped, 1u);
  EXPECT_EQ(scalars.launches, 2u);
  EXPECT_EQ(scalars.samples, 32u);
  EXPECT_EQ(scalars.next_loss_scale.growth_tracker, 2u);
}

TEST(FinishedStep, InfiniteNormIsAboveEveryThreshold) {
  step_settings settings;
  settings.skip_above_norm = 1e300;
  step_scalars scalars;
  for (const double total : {infinity, nan}) {
    test::advance(settings, measured(total), scalars);
    EXPECT_EQ(scalars.skip, 1u);
    EXPECT_EQ(scalars.found_inf, 1u);
  }
}

TEST(FinishedStep, GradientThatIsNotFiniteIsSaidButNotSkippedWhenNobodyAsked) {
  step_scalars scalars;
  test::advance({}, measured(nan), scalars);
  EXPECT_EQ(scalars.skip, 0u);
  EXPECT_EQ(scalars.found_inf, 1u);
  EXPECT_EQ(scalars.grad_norm, infinity);
  EXPECT_EQ(scalars.step, 1u);
}

TEST(FinishedStep, ClippingImpliesSkippingOnWhatIsNotFinite) {
  step_settings settings;
  settings.max_grad_norm = 1.0;
  step_scalars scalars;
  test::advance(settings, measured(nan), scalars);
  EXPECT_EQ(scalars.skip, 1u);
}

TEST(FinishedStep, FoundInfInputSkipsAndBacksTheScaleOffWithoutAnyMeasure) {
  const float input = 1.0f;
  step_settings settings;
  settings.found_inf_input = &input;
  settings.scaling.rule = loss_scale_rule::torch_amp;
  step_scalars scalars;
  scalars.next_loss_scale.scale = 64.0f;
  test::advance(settings, {}, scalars);
  EXPECT_EQ(scalars.skip, 1u);
  EXPECT_EQ(scalars.found_inf, 1u);
  EXPECT_EQ(scalars.loss_scale, 64.0f);
  EXPECT_EQ(scalars.next_loss_scale.scale, 32.0f);
}

TEST(FinishedStep, ScaleOfThisStepIsKeptBesideThatOfTheNext) {
  step_settings settings;
  settings.skip_non_finite = 1;
  settings.scaling.rule = loss_scale_rule::torch_amp;
  settings.scaling.growth_interval = 1;
  step_scalars scalars;
  scalars.next_loss_scale.scale = 4.0f;
  test::advance(settings, measured(16.0), scalars);
  EXPECT_EQ(scalars.loss_scale, 4.0f);
  EXPECT_EQ(scalars.inverse_scale, 0.25f);
  EXPECT_EQ(scalars.grad_norm, 1.0);
  EXPECT_EQ(scalars.next_loss_scale.scale, 8.0f);
  test::advance(settings, measured(16.0), scalars);
  EXPECT_EQ(scalars.loss_scale, 8.0f);
  EXPECT_EQ(scalars.grad_norm, 0.5);
}

TEST(FinishGroup, DirectionAndScaleMeetInTheGradientScale) {
  group_settings group;
  group.flags |= group_maximize;
  EXPECT_EQ(math::finish_group(test::prepared(group, {}), 0.3f).gradient_scale, -0.3f);
}

}  // namespace
}  // namespace stepgraph
