#include <gtest/gtest.h>

#include "conformance/conformance.hpp"

// Cases from the field about weight decay and ownership.
namespace stepgraph::test {
namespace {

class FieldCases : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(FieldCases, one_executor);

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
