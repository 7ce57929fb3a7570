#include "stepgraph/math/loss_scale.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "common/random_numbers.hpp"
#include "common/reference_loss_scale.hpp"

namespace stepgraph {
namespace {

loss_scaling torch_rule(std::uint32_t interval = 2000, double growth = 2.0, double backoff = 0.5) {
  loss_scaling scaling;
  scaling.rule = loss_scale_rule::torch_amp;
  scaling.growth_interval = interval;
  scaling.growth_factor = growth;
  scaling.backoff_factor = backoff;
  return scaling;
}

loss_scaling megatron_rule(std::uint32_t window, std::uint32_t hysteresis, double minimum = 1.0) {
  loss_scaling scaling = megatron_loss_scaling();
  scaling.growth_interval = window;
  scaling.hysteresis = hysteresis;
  scaling.minimum = minimum;
  return scaling;
}

/// The state after a sequence of steps, written as F for finite and x for not.
loss_scale_state after(const loss_scaling& scaling, loss_scale_state state, const char* steps) {
  for (; *steps != '\0'; ++steps) state = math::updated_loss_scale(scaling, state, *steps == 'x');
  return state;
}

void expect_state(const loss_scale_state& found, float scale, std::uint32_t tracker,
                  std::int32_t hysteresis) {
  EXPECT_EQ(found.scale, scale);
  EXPECT_EQ(found.growth_tracker, tracker);
  EXPECT_EQ(found.hysteresis_left, hysteresis);
}

TEST(LossScale, DefaultsAreThoseOfTheHosts) {
  const loss_scaling torch;
  EXPECT_EQ(torch.growth_interval, 2000u);
  EXPECT_EQ(torch.growth_factor, 2.0);
  EXPECT_EQ(torch.backoff_factor, 0.5);
  const loss_scaling megatron = megatron_loss_scaling();
  EXPECT_EQ(megatron.rule, loss_scale_rule::megatron);
  EXPECT_EQ(megatron.growth_interval, 1000u);
  EXPECT_EQ(megatron.hysteresis, 2u);
  EXPECT_EQ(megatron.growth_factor, 2.0);
  EXPECT_EQ(megatron.backoff_factor, 0.5);
  EXPECT_EQ(megatron.minimum, 1.0);
}

TEST(LossScale, FixedNeverMoves) {
  const loss_scaling fixed;
  expect_state(after(fixed, {8.0f, 3, 2}, "FFxFxxFFFF"), 8.0f, 3, 2);
}

TEST(LossScale, TorchGrowsAtTheIntervalAndBacksOffAtOnce) {
  const loss_scaling scaling = torch_rule(3);
  expect_state(after(scaling, {8.0f, 0, 1}, "FF"), 8.0f, 2, 1);
  expect_state(after(scaling, {8.0f, 0, 1}, "FFF"), 16.0f, 0, 1);
  expect_state(after(scaling, {8.0f, 0, 1}, "FFFFF"), 16.0f, 2, 1);
  expect_state(after(scaling, {8.0f, 0, 1}, "FFx"), 4.0f, 0, 1);
  expect_state(after(scaling, {8.0f, 0, 1}, "xx"), 2.0f, 0, 1);
  expect_state(after(scaling, {8.0f, 0, 1}, "FFxFF"), 4.0f, 2, 1);
}

TEST(LossScale, TorchKeepsAScaleWhoseGrowthWouldNotBeFinite) {
  const loss_scaling scaling = torch_rule(2);
  expect_state(after(scaling, {0x1p127f, 0, 1}, "FF"), 0x1p127f, 0, 1);
  expect_state(after(scaling, {0x1p126f, 0, 1}, "FFFF"), 0x1p127f, 0, 1);
  // A product that rounds to infinity although it is finite in double.
  expect_state(after(torch_rule(1, 1.0 + 0x1p-25), {std::numeric_limits<float>::max(), 0, 1}, "F"),
               std::numeric_limits<float>::max(), 0, 1);
}

TEST(LossScale, TorchTakesProductsInDouble) {
  // The factor in f32 would be another one.
  const loss_scaling scaling = torch_rule(1, 1.0 + 0x1p-30, 0.7);
  EXPECT_EQ(after(scaling, {3.0f, 0, 1}, "x").scale, static_cast<float>(3.0 * 0.7));
  EXPECT_EQ(after(scaling, {3.0f, 0, 1}, "F").scale, 3.0f);
}

TEST(LossScale, MegatronShrinksOnlyWhenItsHysteresisIsUsedUp) {
  const loss_scaling scaling = megatron_rule(4, 2);
  expect_state(after(scaling, {64.0f, 0, 2}, "x"), 64.0f, 0, 1);
  expect_state(after(scaling, {64.0f, 0, 2}, "xx"), 32.0f, 0, 0);
  // From then on every bad step shrinks it, in a row or not.
  expect_state(after(scaling, {64.0f, 0, 2}, "xxx"), 16.0f, 0, -1);
  expect_state(after(scaling, {64.0f, 0, 2}, "xxFxFx"), 8.0f, 0, -2);
}

TEST(LossScale, MegatronGivesHysteresisBackOnlyAtTheWindow) {
  const loss_scaling scaling = megatron_rule(4, 2);
  expect_state(after(scaling, {64.0f, 0, 2}, "xFFF"), 64.0f, 3, 1);
  expect_state(after(scaling, {64.0f, 0, 2}, "xFFFF"), 128.0f, 0, 2);
  expect_state(after(scaling, {64.0f, 0, 2}, "xxxFFFFx"), 32.0f, 0, 1);
}

TEST(LossScale, MegatronNeverShrinksBelowTheMinimum) {
  const loss_scaling scaling = megatron_rule(1000, 1, 5.0);
  expect_state(after(scaling, {16.0f, 0, 1}, "x"), 8.0f, 0, 0);
  expect_state(after(scaling, {16.0f, 0, 1}, "xx"), 5.0f, 0, -1);
  expect_state(after(scaling, {16.0f, 0, 1}, "xxxx"), 5.0f, 0, -3);
}

/// Random sequences in which bad steps are rare, common, or the rule.
template <class Check>
void for_random_sequences(Check&& check) {
  test::integer_generator random(17);
  for (const std::uint64_t one_in : {2u, 5u, 40u}) {
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<bool> bad;
      for (int step = 0; step < 500; ++step) bad.push_back(random.below(one_in) == 0);
      check(bad, static_cast<std::uint32_t>(1 + random.below(12)), random);
    }
  }
}

TEST(LossScale, TorchRuleIsItsReferenceOverRandomOverflows) {
  for_random_sequences([](const std::vector<bool>& bad, std::uint32_t interval, auto& random) {
    const loss_scaling scaling =
        torch_rule(interval, random.below(2) == 0 ? 2.0 : 1.7, random.below(2) == 0 ? 0.5 : 0.3);
    loss_scale_state state = {65536.0f, 0, 1};
    test::reference_torch_scaler reference(65536.0f, scaling);
    for (std::size_t step = 0; step < bad.size(); ++step) {
      state = math::updated_loss_scale(scaling, state, bad[step]);
      reference.update(bad[step]);
      ASSERT_EQ(state.scale, reference.scale) << step;
      ASSERT_EQ(state.growth_tracker, static_cast<std::uint32_t>(reference.growth_tracker)) << step;
    }
  });
}

TEST(LossScale, MegatronRuleIsItsReferenceOverRandomOverflows) {
  for_random_sequences([](const std::vector<bool>& bad, std::uint32_t window, auto& random) {
    loss_scaling scaling = megatron_rule(window, 1 + static_cast<std::uint32_t>(random.below(4)));
    if (random.below(2) == 0) scaling.backoff_factor = 0.3;
    loss_scale_state state = {0x1p32f, 0, static_cast<std::int32_t>(scaling.hysteresis)};
    test::reference_megatron_scaler reference(0x1p32f, scaling);
    for (std::size_t step = 0; step < bad.size(); ++step) {
      state = math::updated_loss_scale(scaling, state, bad[step]);
      reference.update(bad[step]);
      ASSERT_EQ(state.scale, reference.scale) << step;
      ASSERT_EQ(state.growth_tracker, static_cast<std::uint32_t>(reference.growth_tracker)) << step;
      ASSERT_EQ(state.hysteresis_left, reference.hysteresis_tracker) << step;
    }
  });
}

}  // namespace
}  // namespace stepgraph
