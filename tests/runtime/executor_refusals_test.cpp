#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "common/expect_error.hpp"
#include "common/warmed_up.hpp"
#include "runtime/host_tensor.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/host_executor.hpp"

namespace stepgraph::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// A tensor "weight" in group "decayed" without a schedule, and a group "scheduled" without
/// tensors.
step_plan plan_of(host_tensor& memory, const step_options& options = {.skip_non_finite = true}) {
  step_builder builder;
  builder.set_options(options);
  builder.add_group({.name = "decayed", .learning_rate = 0.1});
  builder.add_group(
      {.name = "scheduled",
       .learning_rate_schedule = warmed_up(learning_rate_style::linear, 0.0, 1.0, 0.0, 0, 10)});
  builder.add_tensor(0, memory.operands("weight"));
  return builder.build();
}

struct setter_refusal {
  const char* name;
  std::vector<std::string> words;
  std::function<void(executor&)> call;
};

std::vector<setter_refusal> setter_refusals() {
  return {
      {"missing_group", {"group 2", "2 groups"}, [](auto& e) { e.set_learning_rate(2, 0.1); }},
      {"missing_group_for_weight_decay", {"group 7"}, [](auto& e) { e.set_weight_decay(7, 0.1); }},
      {"missing_group_for_betas", {"group 7"}, [](auto& e) { e.set_betas(7, 0.9, 0.99); }},
      {"missing_group_for_eps", {"group 7"}, [](auto& e) { e.set_eps(7, 0.1); }},
      {"missing_group_for_step", {"group 7"}, [](auto& e) { e.set_group_step(7, 1); }},
      {"missing_group_for_schedule", {"group 7"}, [](auto& e) { e.resume_schedule(7); }},
      {"negative_learning_rate",
       {"decayed", "learning_rate", "-1"},
       [](auto& e) { e.set_learning_rate(0, -1.0); }},
      {"nan_learning_rate",
       {"decayed", "learning_rate", "nan"},
       [](auto& e) { e.set_learning_rate(0, nan); }},
      {"infinite_weight_decay",
       {"decayed", "weight_decay", "inf"},
       [](auto& e) { e.set_weight_decay(0, infinity); }},
      {"beta1_of_one", {"decayed", "beta1", "[0, 1)"}, [](auto& e) { e.set_betas(0, 1.0, 0.99); }},
      {"beta2_of_one", {"decayed", "beta2", "[0, 1)"}, [](auto& e) { e.set_betas(0, 0.5, 1.0); }},
      {"nan_eps", {"decayed", "eps", "nan"}, [](auto& e) { e.set_eps(0, nan); }},
      {"zero_loss_scale", {"loss_scale", "0"}, [](auto& e) { e.set_loss_scale(0.0); }},
      {"nan_loss_scale", {"loss_scale", "nan"}, [](auto& e) { e.set_loss_scale(nan); }},
      {"negative_max_grad_norm",
       {"max_grad_norm", "-1"},
       [](auto& e) { e.set_max_grad_norm(-1.0); }},
      {"nan_skip_above_norm",
       {"skip_above_norm", "nan"},
       [](auto& e) { e.set_skip_above_norm(nan); }},
      {"loss_scale_that_is_zero_in_f32",
       {"loss_scale", "f32"},
       [](auto& e) { e.set_loss_scale(1e-60); }},
      {"state_of_another_number_of_groups",
       {"1 groups", "2"},
       [](auto& e) {
         step_status state;
         state.groups.resize(1);
         e.load_state(state);
       }},
      {"state_with_a_loss_scale_of_zero",
       {"loss_scale", "0"},
       [](auto& e) {
         step_status state = e.status();
         state.step = 1000;
         state.next_loss_scale.scale = 0.0f;
         e.load_state(state);
       }},
      {"no_schedule_to_resume", {"decayed", "schedule"}, [](auto& e) { e.resume_schedule(0); }},
      {"rebind_of_a_missing_tensor",
       {"tensor 1", "1 tensor"},
       [](auto& e) { e.rebind(1, operand_kind::parameter, &e); }},
      {"rebind_to_null",
       {"weight", "exp_avg", "null"},
       [](auto& e) { e.rebind(0, operand_kind::exp_avg, nullptr); }},
      {"rebind_to_misaligned_memory",
       {"weight", "gradient", "4 bytes"},
       [](auto& e) {
         auto* const memory = static_cast<std::byte*>(e.plan().tensors[0].operands.parameter.data);
         e.rebind(0, operand_kind::gradient, memory + 2);
       }},
      {"rebind_of_a_master_that_does_not_exist",
       {"weight", "master"},
       [](auto& e) { e.rebind(0, operand_kind::master, &e); }},
      {"rebind_of_a_maximum_that_does_not_exist",
       {"weight", "max_exp_avg_sq"},
       [](auto& e) { e.rebind(0, operand_kind::max_exp_avg_sq, &e); }},
  };
}

class ExecutorSetter : public ::testing::TestWithParam<setter_refusal> {};

INSTANTIATE_TEST_SUITE_P(Refuses, ExecutorSetter, ::testing::ValuesIn(setter_refusals()),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(ExecutorSetter, SaysWhyChangesNothingAndGoesOn) {
  host_tensor memory;
  host_tensor untouched;
  host_executor executor(plan_of(memory));
  host_executor expected(plan_of(untouched));
  executor.launch();
  expected.launch();
  expect_error<usage_error>([&] { GetParam().call(executor); }, GetParam().words);
  executor.launch();
  expected.launch();
  EXPECT_EQ(memory.parameter, untouched.parameter);
  EXPECT_EQ(memory.exp_avg, untouched.exp_avg);
  EXPECT_EQ(memory.exp_avg_sq, untouched.exp_avg_sq);
  EXPECT_EQ(executor.status().groups[1].learning_rate, expected.status().groups[1].learning_rate);
}

TEST(HostExecutor, SettingsOfTheNormAreRefusedWhereItIsNotMeasured) {
  host_tensor memory;
  host_executor executor(plan_of(memory, {}));
  expect_error<usage_error>([&] { executor.set_max_grad_norm(1.0); }, {"max_grad_norm", "measure"});
  expect_error<usage_error>([&] { executor.set_skip_above_norm(1.0); },
                            {"skip_above_norm", "measure"});
  executor.launch();
  EXPECT_EQ(executor.status().step, 1u);
}

TEST(HostExecutor, PlanOfShapesAloneIsRefused) {
  step_builder builder(plan_purpose::inspect);
  builder.add_group({});
  expect_error<usage_error>([&] { host_executor(builder.build()); }, {"inspect", "memory"});
}

TEST(HostExecutor, PlanOfACudaDeviceIsRefused) {
  host_tensor memory;
  tensor_operands operands = memory.operands("weight");
  for (tensor_view* view :
       {&operands.parameter, &*operands.gradient, &operands.exp_avg, &operands.exp_avg_sq}) {
    view->device = {device_kind::cuda, 0};
  }
  step_builder builder;
  builder.add_tensor(builder.add_group({}), operands);
  expect_error<usage_error>([&] { host_executor(builder.build()); }, {"cuda:0", "host"});
}

TEST(HostExecutor, MovedExecutorGoesOn) {
  host_tensor memory;
  host_executor first(plan_of(memory));
  first.launch();
  first.set_learning_rate(0, 0.2);
  host_executor second(std::move(first));
  second.launch();
  EXPECT_NEAR(memory.parameter[0], 0.7, 1e-6);
  host_tensor other;
  host_executor third(plan_of(other));
  third = std::move(second);
  third.launch();
  EXPECT_NEAR(memory.parameter[0], 0.5, 1e-6);
  EXPECT_EQ(other.parameter[0], 1.0f);
}

TEST(HostExecutor, PlanIsTheOneItWasBuiltWith) {
  host_tensor memory;
  const step_plan plan = plan_of(memory);
  const host_executor executor(plan);
  EXPECT_EQ(executor.plan().nodes.size(), plan.nodes.size());
  EXPECT_EQ(executor.plan().tensors[0].operands.name, "weight");
}

TEST(Names, OperandsHaveTheNamesOfTheField) {
  EXPECT_STREQ(name_of(operand_kind::parameter), "parameter");
  EXPECT_STREQ(name_of(operand_kind::gradient), "gradient");
  EXPECT_STREQ(name_of(operand_kind::master), "master");
  EXPECT_STREQ(name_of(operand_kind::exp_avg), "exp_avg");
  EXPECT_STREQ(name_of(operand_kind::exp_avg_sq), "exp_avg_sq");
  EXPECT_STREQ(name_of(operand_kind::max_exp_avg_sq), "max_exp_avg_sq");
}

TEST(Names, DevicesAreWrittenAsTheFrameworksDo) {
  EXPECT_EQ(name_of(device_location{}), "host");
  EXPECT_EQ(name_of(device_location{device_kind::cuda, 3}), "cuda:3");
}

}  // namespace
}  // namespace stepgraph::test
