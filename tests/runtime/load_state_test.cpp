#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "common/executor_adapter.hpp"
#include "common/warmed_up.hpp"
#include "runtime/host_tensor.hpp"
#include "stepgraph/host_executor.hpp"

// A state that is loaded between launches, and setters beside launches.
namespace stepgraph::test {
namespace {

step_options scaled_options() {
  step_options options;
  options.loss_scale = 8.0;
  options.scaling = megatron_loss_scaling();
  options.scaling.growth_interval = 3;
  options.samples_per_step = 4;
  options.record_capacity = 8;
  return options;
}

/// Two groups, the second behind the first by `behind` updates and on a schedule.
step_plan plan_of(host_tensor& memory, std::uint64_t behind = 0) {
  step_builder builder;
  builder.set_options(scaled_options());
  builder.add_group({.name = "plain", .learning_rate = 0.1, .step = behind});
  builder.add_group(
      {.name = "scheduled",
       .learning_rate_schedule = warmed_up(learning_rate_style::linear, 0.0, 1.0, 0.0, 0, 100)});
  builder.add_tensor(0, memory.operands("weight"));
  return builder.build();
}

TEST(LoadState, ReachesTheNextLaunchAndLaunchesCountOn) {
  host_tensor saved_memory;
  host_executor saved(plan_of(saved_memory, 7));
  for (int step = 0; step < 5; ++step) saved.launch();
  const step_status state = saved.status();

  host_tensor memory;
  host_executor resumed(plan_of(memory));
  resumed.launch();
  resumed.load_state(state);
  EXPECT_EQ(resumed.status().step, 1u) << "values that no launch has taken are not visible";
  for (int step = 0; step < 4; ++step) {
    saved.launch();
    resumed.launch();
    expect_same_status(resumed.status(), saved.status());
  }
  // Records number the launches of this executor, not those of the one that was saved.
  EXPECT_EQ(resumed.read_records().records.back().launch, 5u);
}

TEST(LoadState, OfAStateJustReadChangesNothing) {
  host_tensor first_memory;
  host_tensor second_memory;
  host_executor first(plan_of(first_memory));
  host_executor second(plan_of(second_memory));
  for (int step = 0; step < 12; ++step) {
    if (step == 4 || step == 9) {
      first_memory.gradient[3] = second_memory.gradient[3] = std::numeric_limits<float>::infinity();
    }
    first.launch();
    second.load_state(second.status());
    second.launch();
    first_memory.gradient[3] = second_memory.gradient[3] = 1.0f;
    expect_same_status(second.status(), first.status());
  }
  EXPECT_EQ(first.status().skipped, 2u);
  EXPECT_EQ(first_memory.parameter, second_memory.parameter);
}

TEST(LoadState, LaterSettersWinOverIt) {
  host_tensor memory;
  host_executor executor(plan_of(memory));
  step_status state = executor.status();
  state.step = 50;
  state.next_loss_scale.scale = 64.0f;
  state.groups[0].step = 60;
  executor.load_state(state);
  executor.set_loss_scale(128.0);
  executor.set_group_step(0, 70);
  executor.launch();
  EXPECT_EQ(executor.status().step, 51u);
  EXPECT_EQ(executor.status().loss_scale, 128.0);
  EXPECT_EQ(executor.status().groups[0].step, 71u);
}

TEST(LoadState, HysteresisBelowZeroSurvives) {
  host_tensor memory;
  host_executor executor(plan_of(memory));
  step_status state = executor.status();
  state.next_loss_scale.hysteresis_left = -5;
  executor.load_state(state);
  executor.launch();
  EXPECT_EQ(executor.status().next_loss_scale.hysteresis_left, -5);
}

TEST(HostExecutor, LossScaleAddressHoldsTheScaleOfTheNextStep) {
  host_tensor memory;
  host_executor executor(plan_of(memory));
  const float* const scale = executor.loss_scale_address();
  EXPECT_EQ(*scale, 8.0f);
  for (int step = 0; step < 9; ++step) {
    const double expected = static_cast<double>(*scale);
    executor.launch();
    EXPECT_EQ(executor.status().loss_scale, expected);
    EXPECT_EQ(executor.loss_scale_address(), scale);
  }
  EXPECT_EQ(*scale, 64.0f);
}

}  // namespace
}  // namespace stepgraph::test
