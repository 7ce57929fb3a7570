#include <gtest/gtest.h>

#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// Lists of tensors: empty ones, many groups, many signatures.
namespace stepgraph::test {
namespace {

class Lists : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Lists, one_executor);

TEST_P(Lists, A13_EmptyTensorBesideAFullOne) {
  test_problem problem;
  problem.groups = {{.name = "group", .learning_rate = 0.1}};
  problem.add_uniform("full", 0, 16, {}, 1.0f, 1.0f);
  problem.add_uniform("empty", 0, 0, {}, 1.0f, 1.0f);
  const auto adapter = make(problem);
  adapter->launch();
  for (const float value : adapter->values(0, parameter_operand)) EXPECT_NEAR(value, 0.9, 1e-7);
}

TEST_P(Lists, OnlyEmptyTensorsStillCountTheStep) {
  test_problem problem;
  problem.options.skip_non_finite = true;
  problem.add_uniform("empty", 0, 0, {}, 1.0f, 1.0f);
  const auto adapter = make(problem);
  adapter->launch(2);
  EXPECT_EQ(adapter->get().status().step, 2u);
  EXPECT_EQ(adapter->get().status().grad_norm, 0.0);
}

TEST_P(Lists, A27_EmptyGroupCountsItsSteps) {
  test_problem problem;
  problem.groups = {{.name = "full"}, {.name = "empty"}};
  problem.add_uniform("tensor", 0, 8, {}, 1.0f, 1.0f);
  const auto adapter = make(problem);
  adapter->launch(3);
  const step_status status = adapter->get().status();
  ASSERT_EQ(status.groups.size(), 2u);
  EXPECT_EQ(status.groups[0].step, 3u);
  EXPECT_EQ(status.groups[1].step, 3u);
}

TEST_P(Lists, A16_ManyGroupsOfOneTensorWithTheirOwnNumbers) {
  test_problem problem;
  problem.groups.clear();
  for (group_id g = 0; g < 465; ++g) {
    problem.groups.push_back({.name = "group " + std::to_string(g),
                              .learning_rate = 1e-3 * (1.0 + g),
                              .weight_decay = 1e-3 * (g % 11)});
    problem.add({"tensor " + std::to_string(g), g, 1 + g % 70, {}});
  }
  const auto adapter = make(problem);
  run_and_check_against_float64(*adapter, 2);
  // As many launches as one group would need.
  EXPECT_EQ(adapter->get().plan().nodes.size(), 2u);
}

TEST_P(Lists, HundredsOfSmallTensorsMatchFloat64) {
  test_problem problem;
  problem.options.skip_non_finite = true;
  integer_generator random(5);
  for (int t = 0; t < 400; ++t) {
    problem.add({"tensor " + std::to_string(t), 0, random.below(300), {}});
  }
  run_and_check_against_float64(*make(problem), 1);
}

// More chunks than one block of grad_stats takes alone.
TEST_P(Lists, NormOfThousandsOfChunksIsThatOfFloat64) {
  test_problem problem;
  problem.options = {.max_grad_norm = 1.0};
  update_signature small = {storage_format::bf16, storage_format::bf16, storage_format::none,
                            storage_format::f32, storage_format::f32};
  for (int t = 0; t < 4100; ++t) {
    problem.add({"tensor " + std::to_string(t), 0, 2, small});
  }
  run_and_check_against_float64(*make(problem), 1);
}

}  // namespace
}  // namespace stepgraph::test
