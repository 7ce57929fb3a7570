#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// Cases from the field about values: scaling, clipping, weight decay, ownership.
namespace stepgraph::test {
namespace {

class FieldCases : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(FieldCases, one_executor);

constexpr float infinity = std::numeric_limits<float>::infinity();

TEST_P(FieldCases, A06_NormJoinsAllTensorsAndZeroGradientsClipToOne) {
  test_problem problem;
  problem.groups = {{.name = "first"}, {.name = "second"}};
  problem.options.max_grad_norm = 1.0;
  problem.add_uniform("three", 0, 1, {}, 1.0f, 3.0f);
  problem.add_uniform("zero", 0, 1, {}, 1.0f, 0.0f);
  problem.add_uniform("four", 1, 1, {}, 1.0f, 4.0f);
  const auto adapter = make(problem);
  adapter->launch();
  EXPECT_EQ(adapter->get().status().grad_norm, 5.0);
  EXPECT_NEAR(adapter->get().status().clip_coefficient, 0.2, 1e-6);
  const float zero = 0.0f;
  for (std::size_t t = 0; t < 3; ++t) {
    adapter->write(t, gradient_operand, encode(storage_format::f32, std::span(&zero, 1)));
  }
  adapter->launch();
  EXPECT_EQ(adapter->get().status().grad_norm, 0.0);
  EXPECT_EQ(adapter->get().status().clip_coefficient, 1.0);
  EXPECT_FALSE(adapter->get().status().last_skipped);
  for (std::size_t t = 0; t < 3; ++t) {
    EXPECT_TRUE(std::isfinite(adapter->values(t, parameter_operand)[0]));
  }
}

TEST_P(FieldCases, A18_ScaledGradientIsUnscaledOnce) {
  const group_options group = {.name = "group", .learning_rate = 0.1};
  test_problem problem = uniform_problem(group, 1.0f, 65536.0f * 1e-3f);
  problem.options = {.skip_non_finite = true, .loss_scale = 65536.0};
  const auto adapter = make(problem);
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.900001, 2e-7);  // unscaled twice: 0.939590
  const std::vector<operand_set> before = adapter->read_all();
  adapter->write(0, gradient_operand, encode(storage_format::f32, std::span(&infinity, 1)));
  adapter->launch();
  EXPECT_EQ(adapter->read_all()[0][parameter_operand], before[0][parameter_operand]);
  EXPECT_EQ(adapter->read_all()[0][exp_avg_operand], before[0][exp_avg_operand]);
  EXPECT_EQ(adapter->read_all()[0][exp_avg_sq_operand], before[0][exp_avg_sq_operand]);
}

TEST_P(FieldCases, A20_OneInfiniteGradientBetweenTwoOrdinaryOnes) {
  test_problem problem = uniform_problem({.name = "group", .learning_rate = 0.1}, 1.0f, 1.0f);
  problem.options.skip_non_finite = true;
  const auto adapter = make(problem);
  for (const float gradient : {1.0f, infinity, 1.0f}) {
    adapter->write(0, gradient_operand, encode(storage_format::f32, std::span(&gradient, 1)));
    adapter->launch();
  }
  EXPECT_NEAR(adapter->first_value(), 0.8, 1e-6);
  EXPECT_EQ(adapter->get().status().groups[0].step, 2u);
}

TEST_P(FieldCases, NonFiniteGradientIsAppliedWhenNobodyAskedToSkip) {
  const auto adapter = make(uniform_problem({.name = "group"}, 1.0f, infinity));
  adapter->launch();
  EXPECT_EQ(adapter->get().status().skipped, 0u);
  EXPECT_FALSE(std::isfinite(adapter->first_value()));
}

TEST_P(FieldCases, ClippingImpliesSkippingNonFiniteGradients) {
  test_problem problem = uniform_problem({.name = "group"}, 1.0f, infinity);
  problem.options.max_grad_norm = 1.0;
  const auto adapter = make(problem);
  adapter->launch();
  EXPECT_EQ(adapter->get().status().skipped, 1u);
  EXPECT_EQ(adapter->first_value(), 1.0);
}

TEST_P(FieldCases, A21_NormOfHugeGradientsIsFiniteAndEachIsClipped) {
  test_problem problem;
  problem.groups = {{.name = "group", .learning_rate = 0.1, .eps = 1.0}};
  problem.options = {.skip_non_finite = true, .max_grad_norm = 1.0};
  for (int t = 0; t < 100; ++t) {
    problem.add_uniform("tensor " + std::to_string(t), 0, 1, {}, 1.0f, 1e20f);
  }
  const auto adapter = make(problem);
  adapter->launch();
  const double norm = adapter->get().status().grad_norm;
  EXPECT_NEAR(norm / 1e21, 1.0, 1e-6);
  // Each gradient is clipped to 0.1, of which a tenth enters the first moment.
  for (const std::size_t t : {0u, 50u, 99u}) {
    EXPECT_NEAR(adapter->values(t, exp_avg_operand)[0], 0.01, 1e-8);
  }
  for (int replay = 0; replay < 100; ++replay) {
    adapter->launch();
    const double again = adapter->get().status().grad_norm;
    ASSERT_EQ(std::memcmp(&again, &norm, sizeof(norm)), 0) << replay;
  }
  const std::vector<operand_set> before = adapter->read_all();
  adapter->write(7, gradient_operand, encode(storage_format::f32, std::span(&infinity, 1)));
  adapter->launch();
  EXPECT_TRUE(adapter->get().status().last_skipped);
  EXPECT_EQ(adapter->read_all()[0], before[0]);
}

TEST_P(FieldCases, A26_NothingOfTheBuilderIsNeededAfterConstruction) {
  test_problem problem;
  problem.groups = {{.name = std::string(100, 'g'), .learning_rate = 0.1}};
  problem.add_uniform(std::string(100, 't'), 0, 3000, {}, 1.0f, 1.0f);
  // The adapter's plan and its builder are gone; overwrite what was theirs.
  const auto adapter = make(problem);
  problem.groups[0].name.assign(100, 'x');
  problem.groups[0].learning_rate = 1e9;
  problem.tensors[0].name.assign(100, 'x');
  problem = {};
  std::vector<std::vector<char>> reused;
  for (int i = 0; i < 200; ++i) reused.emplace_back(64 * (i + 1), 'x');
  adapter->launch(2);
  for (const float value : adapter->values(0, parameter_operand)) EXPECT_NEAR(value, 0.8, 1e-6);
  EXPECT_EQ(adapter->get().plan().tensors[0].operands.name, std::string(100, 't'));
}

struct decay_case {
  const char* name;
  weight_decay_mode mode;
  float parameter;
  float gradient;
  double expected_parameter;
  double expected_exp_avg;
  double expected_exp_avg_sq;
};

std::string test_name(const decay_case& tested) { return tested.name; }

const decay_case decay_cases[] = {
    {"A31_l2_against_the_gradient", weight_decay_mode::l2, 10.0f, -0.5f, 9.9, 0.05, 2.5e-4},
    {"A31_decoupled_against_the_gradient", weight_decay_mode::decoupled, 10.0f, -0.5f, 10.0, -0.05,
     2.5e-4},
    {"A31_l2_with_the_gradient", weight_decay_mode::l2, 1.0f, 0.5f, 0.9, 0.06, 3.6e-4},
    {"A31_decoupled_with_the_gradient", weight_decay_mode::decoupled, 1.0f, 0.5f, 0.89, 0.05,
     2.5e-4},
};

auto every_decay_case(executor_kind kind) {
  return ::testing::Combine(::testing::Values(kind), ::testing::ValuesIn(decay_cases));
}

class WeightDecay : public ConformanceWith<decay_case> {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(WeightDecay, every_decay_case);

TEST_P(WeightDecay, EntersTheGradientOrShrinksTheParameter) {
  const auto adapter = make(uniform_problem(
      {.name = "group", .learning_rate = 0.1, .weight_decay = 0.1, .mode = tested().mode},
      tested().parameter, tested().gradient));
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), tested().expected_parameter, 1e-6);
  EXPECT_NEAR(adapter->first_value(exp_avg_operand), tested().expected_exp_avg, 1e-8);
  EXPECT_NEAR(adapter->first_value(exp_avg_sq_operand), tested().expected_exp_avg_sq, 1e-10);
}

}  // namespace
}  // namespace stepgraph::test
