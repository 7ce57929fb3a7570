#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "common/warmed_up.hpp"
#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// A captured step must never train on a number from the time of its capture: what changes between
// steps reaches the next one, and only the next one. A01 to A05 are cases from the field.
namespace stepgraph::test {
namespace {

class FrozenNumbers : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(FrozenNumbers, one_executor);

const group_options tenth = {.name = "group", .learning_rate = 0.1};

TEST_P(FrozenNumbers, A01_StepCountAdvancesOnReplay) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  adapter->launch(2);
  EXPECT_NEAR(adapter->first_value(), 0.8, 1e-6);  // a frozen step gives 0.765616
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.7, 1e-6);  // a frozen step gives 0.609076
  adapter->launch(7);
  EXPECT_NEAR(adapter->first_value(), 1e-8, 1e-6);
  EXPECT_EQ(adapter->get().status().groups[0].step, 10u);
}

// What a step frozen at 1 computes, so that the numbers above are known to tell the two apart.
TEST_P(FrozenNumbers, A01_ResettingTheStepGivesTheFrozenNumbers) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  adapter->launch();
  adapter->get().set_group_step(0, 0);
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.765616, 1e-6);
  adapter->get().set_group_step(0, 0);
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.609076, 1e-6);
}

TEST_P(FrozenNumbers, A02_LearningRateHalvedEveryStep) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  const void* const exp_avg = adapter->get().plan().tensors[0].operands.exp_avg.data;
  double learning_rate = 0.1;
  for (int step = 0; step < 5; ++step) {
    adapter->get().set_learning_rate(0, learning_rate);
    adapter->launch();
    learning_rate /= 2.0;
  }
  EXPECT_NEAR(adapter->first_value(), 0.80625, 1e-6);  // frozen: 0.5; not halved: 0.7
  // The state is still where the caller put it.
  EXPECT_EQ(adapter->get().plan().tensors[0].operands.exp_avg.data, exp_avg);
  EXPECT_NEAR(adapter->first_value(exp_avg_operand), 0.40951, 1e-6);
}

TEST_P(FrozenNumbers, A03_LearningRateChangedBetweenTwoLaunches) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  adapter->launch();
  adapter->get().set_learning_rate(0, 0.05);
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.85, 1e-6);
}

TEST_P(FrozenNumbers, A04_WeightDecayChangedEveryStep) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 0.0f));
  for (int step = 1; step <= 4; ++step) {
    adapter->get().set_weight_decay(0, 0.1 * step);
    adapter->launch();
  }
  EXPECT_NEAR(adapter->first_value(), 0.90345, 1e-6);  // frozen: 0.931780 or worse
}

TEST_P(FrozenNumbers, A05_FactorOfABaseNeverCompounds) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  for (int step = 1; step <= 3; ++step) {
    adapter->get().set_learning_rate(0, 0.5 * 0.1);
    adapter->launch();
    EXPECT_EQ(adapter->get().status().groups[0].learning_rate, 0.05);
    EXPECT_NEAR(adapter->first_value(), 1.0 - 0.05 * step, 1e-6);
  }
}

/// A setter, and the same change to what float64 is told.
struct change {
  const char* name;
  std::function<void(executor&)> apply;
  std::function<void(step_in_force&)> mirror;
};

std::vector<change> every_change() {
  return {
      {"learning rate", [](executor& e) { e.set_learning_rate(0, 0.25); },
       [](step_in_force& f) { f.groups[0].learning_rate = 0.25; }},
      {"weight decay", [](executor& e) { e.set_weight_decay(0, 0.5); },
       [](step_in_force& f) { f.groups[0].weight_decay = 0.5; }},
      {"betas", [](executor& e) { e.set_betas(0, 0.5, 0.75); },
       [](step_in_force& f) { f.groups[0].beta1 = 0.5, f.groups[0].beta2 = 0.75; }},
      {"eps", [](executor& e) { e.set_eps(0, 0.125); },
       [](step_in_force& f) { f.groups[0].eps = 0.125; }},
      {"group step", [](executor& e) { e.set_group_step(0, 40); }, [](step_in_force&) {}},
      {"loss scale", [](executor& e) { e.set_loss_scale(2.0); },
       [](step_in_force& f) { f.options.loss_scale = 2.0; }},
      {"max grad norm", [](executor& e) { e.set_max_grad_norm(0.03125); },
       [](step_in_force& f) { f.options.max_grad_norm = 0.03125; }},
  };
}

test_problem changeable_problem() {
  test_problem problem;
  problem.options.max_grad_norm = 1000.0;  // above the norm: a clipped gradient forgets its scale
  problem.groups = {{.name = "changed", .learning_rate = 0.01, .weight_decay = 0.1},
                    {.name = "other", .learning_rate = 0.02}};
  problem.add({"changed", 0, 500, {}});
  problem.add({"other", 1, 500, {}});
  return problem;
}

TEST_P(FrozenNumbers, EverySetterReachesTheNextLaunchAndStays) {
  for (const change& tested : every_change()) {
    SCOPED_TRACE(tested.name);
    const auto adapter = make(changeable_problem());
    step_in_force in_force(adapter->problem());
    launch_and_check_against_float64(*adapter, in_force);
    tested.apply(adapter->get());
    tested.mirror(in_force);
    launch_and_check_against_float64(*adapter, in_force);
    launch_and_check_against_float64(*adapter, in_force);
  }
}

TEST_P(FrozenNumbers, ReplayAfterEverySetterDiffersFromAReplayWithoutIt) {
  const auto unchanged = make(changeable_problem());
  unchanged->launch(2);
  for (const change& tested : every_change()) {
    const auto changed = make(changeable_problem());
    changed->launch();
    tested.apply(changed->get());
    changed->launch();
    EXPECT_NE(changed->values(0, parameter_operand), unchanged->values(0, parameter_operand))
        << tested.name;
  }
}

TEST_P(FrozenNumbers, AllSettersAtOnceReachTheNextLaunch) {
  const auto adapter = make(changeable_problem());
  step_in_force in_force(adapter->problem());
  launch_and_check_against_float64(*adapter, in_force);
  for (const change& tested : every_change()) {
    tested.apply(adapter->get());
    tested.mirror(in_force);
  }
  launch_and_check_against_float64(*adapter, in_force);
  EXPECT_EQ(adapter->get().status().groups[0].step, 41u);
}

TEST_P(FrozenNumbers, LastOfSeveralSettersWins) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  adapter->get().set_learning_rate(0, 7.0);
  adapter->get().set_learning_rate(0, 0.25);
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.75, 1e-6);
}

TEST_P(FrozenNumbers, StepSetByHandIsCountedFrom) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  adapter->get().set_step(100);
  adapter->launch();
  EXPECT_EQ(adapter->get().status().step, 101u);
}

// Nothing waits between the launches, so on a GPU many are in flight with a value each.
TEST_P(FrozenNumbers, ThousandLaunchesEachKeepTheirOwnLearningRate) {
  test_problem problem;
  problem.groups = {{.name = "first", .weight_decay = 0.1}, {.name = "second"}};
  problem.options.max_grad_norm = 10.0;
  problem.add({"first", 0, 3000, {}});
  problem.add({"second", 1, 100, {}});
  const auto run = [](executor_adapter& adapter) {
    for (int step = 0; step < 1000; ++step) {
      adapter.get().set_learning_rate(0, 1e-5 * (step % 17 + 1));
      if (step % 3 == 0) adapter.get().set_weight_decay(1, 1e-3 * (step % 5));
      if (step % 7 == 0) adapter.get().set_max_grad_norm(1.0 + step % 4);
      adapter.launch();
    }
  };
  const auto adapter = make(problem);
  run(*adapter);
  // Float64 would drift over a thousand steps; the host executor, in order by construction, is the
  // judge. It is judged itself by the sum of its learning rates.
  const auto oracle = make_adapter(executor_kind::host, problem);
  run(*oracle);
  expect_same_bits(problem, adapter->read_all(), oracle->read_all());
  EXPECT_EQ(adapter->get().status().step, 1000u);
}

TEST_P(FrozenNumbers, ThousandLaunchesMoveByTheSumOfTheirLearningRates) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  double sum = 0.0;
  for (int step = 0; step < 1000; ++step) {
    const double learning_rate = step % 2 == 0 ? 1e-3 : 1e-4 * (step % 3);
    adapter->get().set_learning_rate(0, learning_rate);
    adapter->launch();
    sum += learning_rate;
  }
  EXPECT_NEAR(adapter->first_value(), 1.0 - sum, 1e-4);
}

TEST_P(FrozenNumbers, SettersFromAnotherThreadReachTheNextLaunch) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  double expected = 1.0;
  for (int step = 1; step <= 20; ++step) {
    const double learning_rate = 1e-3 * step;
    std::thread([&] { adapter->get().set_learning_rate(0, learning_rate); }).join();
    adapter->launch();
    expected -= learning_rate;
  }
  EXPECT_NEAR(adapter->first_value(), expected, 1e-5);
}

// Without an order between the threads each launch sees some value that was set, never a mixture.
TEST_P(FrozenNumbers, SettersRacingWithLaunchesNeverTear) {
  const auto adapter = make(uniform_problem(tenth, 0.0f, 1.0f));
  std::thread setter([&] {
    for (int i = 0; i < 2000; ++i) adapter->get().set_learning_rate(0, i % 2 == 0 ? 1.0 : 2.0);
  });
  double position = 0.0;
  for (int step = 0; step < 50; ++step) {
    adapter->launch();
    const double moved = position - adapter->first_value();
    position -= moved;
    const double learning_rate = adapter->get().status().groups[0].learning_rate;
    EXPECT_TRUE(learning_rate == 0.1 || learning_rate == 1.0 || learning_rate == 2.0)
        << learning_rate;
    EXPECT_NEAR(moved, learning_rate, 1e-4);
  }
  setter.join();
}

const schedule falling = falling_from(1.0, 10);

TEST_P(FrozenNumbers, ScheduleRunsWithoutTheHost) {
  const auto adapter =
      make(uniform_problem({.name = "group", .learning_rate_schedule = falling}, 0.0f, 1.0f));
  adapter->launch(10);
  // 1 + 0.9 + ... + 0.1
  EXPECT_NEAR(adapter->first_value(), -5.5, 1e-5);
}

TEST_P(FrozenNumbers, LearningRateByHandHoldsUntilTheScheduleResumesWhereItWouldBe) {
  const auto adapter =
      make(uniform_problem({.name = "group", .learning_rate_schedule = falling}, 0.0f, 1.0f));
  const auto next_learning_rate = [&] {
    adapter->launch();
    return adapter->get().status().groups[0].learning_rate;
  };
  EXPECT_EQ(next_learning_rate(), 1.0);
  adapter->get().set_learning_rate(0, 5.0);
  EXPECT_EQ(next_learning_rate(), 5.0);
  EXPECT_EQ(next_learning_rate(), 5.0);
  adapter->get().resume_schedule(0);
  EXPECT_DOUBLE_EQ(next_learning_rate(), 0.7);
}

TEST_P(FrozenNumbers, OfLearningRatesByHandAndReturnsToTheScheduleTheLastWins) {
  const auto adapter =
      make(uniform_problem({.name = "group", .learning_rate_schedule = falling}, 0.0f, 1.0f));
  executor& run = adapter->get();
  const auto next_learning_rate = [&] {
    adapter->launch();
    return run.status().groups[0].learning_rate;
  };
  run.resume_schedule(0);
  run.set_learning_rate(0, 3.0);
  EXPECT_EQ(next_learning_rate(), 3.0);
  run.set_learning_rate(0, 4.0);
  run.resume_schedule(0);
  EXPECT_DOUBLE_EQ(next_learning_rate(), 0.9);
  run.set_learning_rate(0, 5.0);
  run.resume_schedule(0);
  run.set_learning_rate(0, 6.0);
  EXPECT_EQ(next_learning_rate(), 6.0);
  run.resume_schedule(0);
  run.set_learning_rate(0, 7.0);
  run.resume_schedule(0);
  EXPECT_DOUBLE_EQ(next_learning_rate(), 0.7);
}

TEST_P(FrozenNumbers, GroupStepByHandMovesTheScheduleClock) {
  const auto adapter =
      make(uniform_problem({.name = "group", .learning_rate_schedule = falling}, 0.0f, 1.0f));
  adapter->get().set_group_step(0, 6);
  adapter->launch();
  EXPECT_DOUBLE_EQ(adapter->get().status().groups[0].learning_rate, 0.4);
  EXPECT_EQ(adapter->get().status().groups[0].step, 7u);
}

TEST_P(FrozenNumbers, SkippedStepStillTakesItsSettings) {
  test_problem problem = uniform_problem(tenth, 1.0f, 1.0f);
  problem.options.skip_non_finite = true;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto adapter = make(problem);
  adapter->write(0, gradient_operand, encode(storage_format::f32, std::span(&nan, 1)));
  adapter->get().set_learning_rate(0, 0.25);
  adapter->launch();
  EXPECT_EQ(adapter->first_value(), 1.0);
  adapter->write(0, gradient_operand, problem.contents[0][gradient_operand]);
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.75, 1e-6);
}

TEST_P(FrozenNumbers, StatusDoesNotShowValuesThatNoLaunchTook) {
  const auto adapter = make(uniform_problem(tenth, 1.0f, 1.0f));
  adapter->launch();
  adapter->get().set_learning_rate(0, 0.25);
  adapter->get().set_step(50);
  EXPECT_EQ(adapter->get().status().groups[0].learning_rate, 0.1);
  EXPECT_EQ(adapter->get().status().step, 1u);
}

TEST_P(FrozenNumbers, RebindTakesEffectInLaunchOrder) {
  test_problem problem = single_tensor_problem({}, 5000, {.name = "group", .weight_decay = 0.1});
  const operand_bytes first = problem.gradient_at(0, 1);
  const operand_bytes second = problem.gradient_at(0, 2);
  problem.contents[0][gradient_operand] = first;
  const auto adapter = make(problem);
  // Enqueued without waiting: each launch must read the gradient that was bound when it was made.
  adapter->launch();
  adapter->rebind(0, gradient_operand, second, 1);
  adapter->launch();
  adapter->rebind(0, gradient_operand, first);
  adapter->launch();
  const std::vector<operand_set> found = adapter->read_all();

  const auto oracle = make_adapter(executor_kind::host, problem);
  oracle->launch();
  oracle->write(0, gradient_operand, second);
  oracle->launch();
  oracle->write(0, gradient_operand, first);
  oracle->launch();
  expect_same_bits(problem, found, oracle->read_all());
  adapter->expect_guards_intact();
}

TEST_P(FrozenNumbers, EveryOperandCanBeRebound) {
  // Block scales stay where they are, so the formats have none.
  constexpr update_signature signature = {storage_format::bf16, storage_format::f16,
                                          storage_format::f32,  storage_format::f32,
                                          storage_format::bf16, storage_format::bf16};
  const test_problem problem = single_tensor_problem(signature, 4500);
  const test_problem other = [&] {
    test_problem fresh;
    fresh.add({"tensor", 0, 4500, signature}, 99);
    return fresh;
  }();
  const auto adapter = make(problem);
  adapter->launch();
  const operand_set left_behind = adapter->read_all()[0];
  for (std::size_t operand = 0; operand < bindable_operands; ++operand) {
    adapter->rebind(0, operand, other.contents[0][operand], operand % 3);
  }
  adapter->launch();
  const auto oracle = make_adapter(executor_kind::host, other);
  oracle->get().set_group_step(0, 1);
  oracle->launch();
  expect_same_bits(problem, adapter->read_all(), oracle->read_all());
  adapter->expect_guards_intact();
  EXPECT_NE(left_behind, adapter->read_all()[0]);
}

}  // namespace
}  // namespace stepgraph::test
