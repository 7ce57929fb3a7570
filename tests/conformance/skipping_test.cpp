#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/conformance.hpp"

// Skipped steps leave everything as it is: every operand's bits, and the number of updates.
namespace stepgraph::test {
namespace {

class Skipping : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Skipping, one_executor);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
const group_options tenth = {.name = "group", .learning_rate = 0.1};

/// Every kind of operand: masters, remainders, block scales, FP8 with its scaling, a gradient
/// alone.
test_problem varied_problem(const step_options& options) {
  using enum storage_format;
  test_problem problem;
  problem.options = options;
  problem.groups = {{.name = "first", .weight_decay = 0.1}, {.name = "second"}};
  problem.add({"f32", 0, 3000, {}});
  for (const update_signature& signature :
       {update_signature{bf16, bf16, remainder, e4m3, e4m3},
        update_signature{e4m3, bf16, f32, f32, f32}, update_signature{e5m2, f32, none, bf16, f16},
        update_signature{f16, f16, f16, f16, f16, f16}}) {
    problem.add({name_of(signature), 1, 2500, signature});
  }
  problem.add({"alone", 1, 700, gradient_alone(f16)});
  return problem;
}

/// Launches a step that should be skipped.
void expect_skipped(executor_adapter& adapter) {
  const std::vector<operand_set> before = adapter.read_all();
  const step_status status_before = adapter.get().status();
  adapter.launch();
  const step_status status = adapter.get().status();
  EXPECT_TRUE(status.last_skipped);
  EXPECT_EQ(status.skipped, status_before.skipped + 1);
  EXPECT_EQ(status.step, status_before.step);
  EXPECT_EQ(status.samples, status_before.samples);
  for (std::size_t g = 0; g < status.groups.size(); ++g) {
    EXPECT_EQ(status.groups[g].step, status_before.groups[g].step);
    EXPECT_EQ(status.groups[g].learning_rate, status_before.groups[g].learning_rate);
  }
  expect_same_bits(adapter.problem(), adapter.read_all(), before);
  adapter.expect_guards_intact();
}

TEST_P(Skipping, A06_NormAboveTheThresholdKeepsEveryBit) {
  for (const bool unscale : {false, true}) {
    const auto adapter = make(varied_problem({.max_grad_norm = 1.0,
                                              .skip_above_norm = 1e4,
                                              .unscale_gradients = unscale,
                                              .samples_per_step = 8}));
    adapter->run_with_fresh_gradients(2);
    EXPECT_EQ(adapter->get().status().step, 2u);
    std::vector<float> gradient(3000, 0.0f);
    gradient[2999] = 1.1e4f;
    adapter->write_gradient(0, gradient);
    expect_skipped(*adapter);
    EXPECT_FALSE(adapter->get().status().found_inf);
    adapter->run_with_fresh_gradients(1, 5);
    EXPECT_EQ(adapter->get().status().step, 3u);
    EXPECT_EQ(adapter->get().status().samples, 24u);
  }
}

TEST_P(Skipping, A06_ThresholdIsOfTheUnscaledGlobalNorm) {
  test_problem problem;
  problem.options = {.skip_above_norm = 5.0, .loss_scale = 4.0};
  problem.groups = {{.name = "a", .norm_group = "a"}, {.name = "b", .norm_group = "b"}};
  problem.add_uniform("a", 0, 1, {}, 1.0f, 12.0f);
  problem.add_uniform("b", 1, 1, {}, 1.0f, 16.0f);
  const auto adapter = make(problem);
  adapter->launch();
  EXPECT_EQ(adapter->get().status().grad_norm, 5.0);
  EXPECT_FALSE(adapter->get().status().last_skipped) << "just at the threshold";
  adapter->write_gradient(1, std::vector{16.001f});
  expect_skipped(*adapter);
}

TEST_P(Skipping, A06_ThresholdCanBeMovedAndTakenAway) {
  test_problem problem = uniform_problem(tenth, 1.0f, 4.0f);
  problem.options.measure_norm = true;
  const auto adapter = make(problem);
  const auto skips = [&] {
    adapter->launch();
    return adapter->get().status().last_skipped;
  };
  EXPECT_FALSE(skips());
  adapter->get().set_skip_above_norm(3.0);
  EXPECT_TRUE(skips());
  EXPECT_TRUE(skips());
  adapter->get().set_skip_above_norm(4.0);
  EXPECT_FALSE(skips());
  adapter->get().set_skip_above_norm(1.0);
  adapter->get().set_skip_above_norm(0.0);
  EXPECT_FALSE(skips());
  EXPECT_EQ(adapter->get().status().step, 3u);
}

TEST_P(Skipping, A18_ScaledGradientIsUnscaledOnce) {
  for (const bool unscale : {false, true}) {
    test_problem problem = uniform_problem(tenth, 1.0f, 65536.0f * 1e-3f);
    problem.options = {
        .skip_non_finite = true, .loss_scale = 65536.0, .unscale_gradients = unscale};
    const auto adapter = make(problem);
    adapter->launch();
    EXPECT_NEAR(adapter->first_value(), 0.900001, 2e-7);  // unscaled twice: 0.939590
    EXPECT_EQ(adapter->first_value(gradient_operand), unscale ? 1e-3f : 65536.0f * 1e-3f);
    adapter->write_gradient(0, std::vector{infinity});
    expect_skipped(*adapter);
  }
}

TEST_P(Skipping, A18_OneInfiniteGradientKeepsEveryBit) {
  for (const float bad : {infinity, nan}) {
    for (const bool unscale : {false, true}) {
      const auto adapter = make(varied_problem(
          {.skip_non_finite = true, .loss_scale = 65536.0, .unscale_gradients = unscale}));
      adapter->launch();
      std::vector<float> alone(700, 1.0f);
      alone[699] = bad;
      adapter->write_gradient(5, alone);
      expect_skipped(*adapter);
      EXPECT_TRUE(adapter->get().status().found_inf);
    }
  }
}

TEST_P(Skipping, A19_AnythingButExactZeroInTheInputSkips) {
  // Without and with a norm beside it.
  for (const bool measured : {false, true}) {
    test_problem problem = varied_problem({.measure_norm = measured});
    problem.inputs = {{input_kind::found_inf}};
    const auto adapter = make(problem);
    adapter->launch();
    EXPECT_EQ(adapter->get().status().step, 1u);
    for (const float found_inf : {1.0f, 2.0f, 8.0f, 0.5f, nan, infinity, -1.0f, 0x1p-149f}) {
      SCOPED_TRACE(found_inf);
      adapter->write_input(0, found_inf);
      expect_skipped(*adapter);
      EXPECT_TRUE(adapter->get().status().found_inf);
    }
    for (const float found_inf : {0.0f, -0.0f}) {
      adapter->write_input(0, found_inf);
      adapter->launch();
      EXPECT_FALSE(adapter->get().status().last_skipped);
      EXPECT_FALSE(adapter->get().status().found_inf);
    }
    EXPECT_EQ(adapter->get().status().step, 3u);
  }
}

TEST_P(Skipping, A20_OneInfiniteGradientBetweenTwoOrdinaryOnes) {
  test_problem problem = uniform_problem(tenth, 1.0f, 1.0f);
  problem.options.skip_non_finite = true;
  const auto adapter = make(problem);
  for (const float gradient : {1.0f, infinity, 1.0f}) {
    adapter->write_gradient(0, std::vector{gradient});
    adapter->launch();
  }
  EXPECT_NEAR(adapter->first_value(), 0.8, 1e-6);
  EXPECT_EQ(adapter->get().status().groups[0].step, 2u);
}

TEST_P(Skipping, NonFiniteGradientIsAppliedWhenNobodyAskedToSkip) {
  for (const bool measured : {false, true}) {
    test_problem problem = uniform_problem(tenth, 1.0f, infinity);
    problem.options.measure_norm = measured;
    const auto adapter = make(problem);
    adapter->launch();
    EXPECT_EQ(adapter->get().status().skipped, 0u);
    EXPECT_EQ(adapter->get().status().found_inf, measured) << "it is said all the same";
    EXPECT_FALSE(std::isfinite(adapter->first_value()));
  }
}

TEST_P(Skipping, ClippingImpliesSkippingNonFiniteGradients) {
  test_problem problem = uniform_problem(tenth, 1.0f, infinity);
  problem.options.max_grad_norm = 1.0;
  const auto adapter = make(problem);
  expect_skipped(*adapter);
}

TEST_P(Skipping, ZeroedGradientsAreZeroedBySkippedStepsToo) {
  test_problem problem = uniform_problem(tenth, 1.0f, infinity);
  problem.options = {.skip_non_finite = true, .zero_gradients = true};
  const auto adapter = make(problem);
  adapter->launch();
  EXPECT_EQ(adapter->first_value(), 1.0);
  EXPECT_EQ(adapter->first_value(gradient_operand), 0.0);
}

}  // namespace
}  // namespace stepgraph::test
