#include <gtest/gtest.h>

#include <vector>

#include "common/warmed_up.hpp"
#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// Numbers that a step reads from the memory of its tensors: what is there when it runs is in force.
namespace stepgraph::test {
namespace {

class Inputs : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Inputs, one_executor);

TEST_P(Inputs, LearningRateAndWeightDecayReachTheNextReplay) {
  test_problem problem;
  problem.groups = {{.name = "by input", .learning_rate = 7.0, .weight_decay = 7.0},
                    {.name = "by itself", .learning_rate = 1e-2, .weight_decay = 0.2},
                    {.name = "l2", .mode = weight_decay_mode::l2}};
  problem.inputs = {{input_kind::learning_rate, 0, 1e-3f},
                    {input_kind::weight_decay, 0, 0.1f},
                    {input_kind::weight_decay, 2, 0.5f}};
  for (group_id g = 0; g < 3; ++g) problem.add({problem.groups[g].name, g, 2100, {}});
  const auto adapter = make(problem);
  step_in_force in_force(problem);
  for (const float part : {1.0f, 0.5f, 3.0f, 0.0f, 0.1f}) {
    const float learning_rate = 1e-3f * part;
    const float weight_decay = 0.1f / (part + 1.0f);
    adapter->write_input(0, learning_rate);
    adapter->write_input(1, weight_decay);
    adapter->write_input(2, part);
    in_force.groups[0].learning_rate = static_cast<double>(learning_rate);
    in_force.groups[0].weight_decay = static_cast<double>(weight_decay);
    in_force.groups[2].weight_decay = static_cast<double>(part);
    launch_and_check_against_float64(*adapter, in_force);
  }
}

TEST_P(Inputs, ComeBeforeValuesByHandAndSchedules) {
  test_problem problem = uniform_problem(
      {.name = "group",
       .learning_rate_schedule = warmed_up(learning_rate_style::linear, 0.0, 1.0, 0.0, 0, 10)},
      0.0f, 1.0f);
  problem.inputs = {{input_kind::learning_rate, 0, 0.25f}};
  const auto adapter = make(problem);
  adapter->get().set_learning_rate(0, 9.0);
  adapter->launch();
  EXPECT_EQ(adapter->get().status().groups[0].learning_rate, 0.25);
  adapter->get().resume_schedule(0);
  adapter->write_input(0, 0.5f);
  adapter->launch();
  EXPECT_EQ(adapter->get().status().groups[0].learning_rate, 0.5);
  EXPECT_NEAR(adapter->first_value(), -0.75, 1e-6);
}

TEST_P(Inputs, LossScaleIsThatOfTheStepThatReadsIt) {
  test_problem problem = uniform_problem({.name = "group", .learning_rate = 0.1}, 1.0f, 1.0f);
  problem.options = {.measure_norm = true, .loss_scale = 5.0, .unscale_gradients = true};
  problem.inputs = {{input_kind::loss_scale, 0, 65536.0f}};
  const auto adapter = make(problem);
  for (const float scale : {65536.0f, 1024.0f, 3.0f}) {
    adapter->write_input(0, scale);
    adapter->write_gradient(0, std::vector{scale * 1e-3f});
    adapter->launch();
    EXPECT_EQ(adapter->get().status().loss_scale, static_cast<double>(scale));
    EXPECT_NEAR(adapter->get().status().grad_norm, 1e-3, 1e-9);
    EXPECT_NEAR(adapter->first_value(gradient_operand), 1e-3, 1e-9);
  }
  // Three steps by constant gradients of 1e-3 move by the learning rate each.
  EXPECT_NEAR(adapter->first_value(), 0.7, 1e-5);
}

TEST_P(Inputs, AllAtOnceHaveTheBitsOfTheHost) {
  test_problem problem;
  problem.options = {.max_grad_norm = 0.5, .record_capacity = 16};
  problem.groups = {{.name = "first", .weight_decay = 0.1}, {.name = "second"}};
  problem.inputs = {{input_kind::found_inf},
                    {input_kind::loss_scale, 0, 8.0f},
                    {input_kind::learning_rate, 1, 1e-2f},
                    {input_kind::weight_decay, 1, 0.3f},
                    {input_kind::weight_decay, 0, 0.4f}};
  problem.add({"first", 0, 4000, {}});
  problem.add({"second", 1, 100, {storage_format::bf16, storage_format::bf16}});
  const auto run = [](executor_adapter& adapter) {
    for (int step = 0; step < 12; ++step) {
      adapter.write_input(0, step % 5 == 3 ? 1.0f : 0.0f);
      for (std::size_t input = 1; input < 5; ++input) {
        adapter.write_input(input, 0.01f * static_cast<float>(step * 7 % 11 + 1));
      }
      adapter.run_with_fresh_gradients(1, step);
    }
  };
  const auto found = make(problem);
  const auto expected = make_adapter(executor_kind::host, problem);
  run(*found);
  run(*expected);
  expect_same_bits(problem, found->read_all(), expected->read_all());
  expect_same_status(found->get().status(), expected->get().status());
  expect_same_records(found->get().read_records(), expected->get().read_records());
  EXPECT_EQ(expected->get().status().skipped, 2u);
}

}  // namespace
}  // namespace stepgraph::test
