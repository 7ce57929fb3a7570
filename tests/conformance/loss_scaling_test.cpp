#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "common/reference_loss_scale.hpp"
#include "conformance/conformance.hpp"

// Dynamic loss scaling on the device: the gradients of each step are those of its scale, and some
// overflow.
namespace stepgraph::test {
namespace {

class LossScaling : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(LossScaling, one_executor);

constexpr int steps = 50;

/// Which steps overflow; more often towards the end.
std::vector<bool> overflows(std::uint64_t seed) {
  integer_generator random(seed);
  std::vector<bool> bad;
  for (int step = 0; step < steps; ++step) bad.push_back(random.below(step < 25 ? 9 : 3) == 0);
  return bad;
}

test_problem scaled_problem(const loss_scaling& scaling, double initial) {
  test_problem problem;
  problem.options.loss_scale = initial;
  problem.options.scaling = scaling;
  problem.options.max_grad_norm = 1.0;
  problem.options.record_capacity = steps;
  problem.groups = {{.name = "group", .weight_decay = 0.1}};
  problem.add({"f32", 0, 2100, {}});
  problem.add({"bf16", 0, 300, {storage_format::bf16, storage_format::bf16}});
  return problem;
}

/// Runs with gradients that are random times the scale that the reference expects.
template <class Reference>
void run(executor_adapter& adapter, Reference scaler, const std::vector<bool>& bad) {
  const test_problem& problem = adapter.problem();
  for (int step = 0; step < steps; ++step) {
    for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
      integer_generator random(static_cast<std::uint64_t>(step) * 10 + t);
      std::vector<float> gradient(problem.tensors[t].numel);
      for (float& value : gradient) value = random.signed_value(-7, 1) * scaler.scale;
      if (bad[static_cast<std::size_t>(step)] && t == 0) {
        gradient[1234] = std::numeric_limits<float>::infinity();
      }
      adapter.write_gradient(t, gradient);
    }
    adapter.launch();
    scaler.update(bad[static_cast<std::size_t>(step)]);
  }
}

/// Expects the scale and its counters to be the reference's after every step, in the records too.
template <class Reference>
void expect_reference(executor_kind kind, const loss_scaling& scaling, double initial,
                      std::uint64_t seed) {
  const std::vector<bool> bad = overflows(seed);
  const Reference start(static_cast<float>(initial), scaling);
  const auto adapter = make_adapter(kind, scaled_problem(scaling, initial));
  run(*adapter, start, bad);

  // Every state in between, from a run that is stopped there.
  const record_batch batch = (adapter->get().status(), adapter->get().read_records());
  ASSERT_EQ(batch.records.size(), bad.size());
  Reference scaler = start;
  std::uint64_t applied = 0;
  for (std::size_t step = 0; step < bad.size(); ++step) {
    const step_record& record = batch.records[step];
    EXPECT_EQ(record.loss_scale, static_cast<double>(scaler.scale)) << step;
    EXPECT_EQ(record.was_skipped, bad[step]) << step;
    EXPECT_EQ(record.found_inf, bad[step]) << step;
    applied += bad[step] ? 0 : 1;
    EXPECT_EQ(record.step, applied) << step;
    EXPECT_EQ(record.skipped, step + 1 - applied) << step;
    scaler.update(bad[step]);
  }
  const loss_scale_state found = adapter->get().status().next_loss_scale;
  EXPECT_EQ(found.scale, scaler.scale);
  EXPECT_EQ(found.growth_tracker, static_cast<std::uint32_t>(scaler.growth_tracker));
  EXPECT_EQ(found.hysteresis_left, scaler.hysteresis_tracker);
  EXPECT_EQ(adapter->get().status().groups[0].step, applied);

  const auto oracle = make_adapter(executor_kind::host, adapter->problem());
  run(*oracle, start, bad);
  expect_same_bits(adapter->problem(), adapter->read_all(), oracle->read_all());
  expect_same_status(adapter->get().status(), oracle->get().status());
  expect_same_records(batch, oracle->get().read_records());
}

TEST_P(LossScaling, TorchRuleOverRandomOverflows) {
  loss_scaling scaling;
  scaling.rule = loss_scale_rule::torch_amp;
  for (const std::uint32_t interval : {1u, 4u}) {
    scaling.growth_interval = interval;
    expect_reference<reference_torch_scaler>(GetParam(), scaling, 65536.0, 3 + interval);
  }
  scaling.growth_factor = 1.7;
  scaling.backoff_factor = 0.3;
  expect_reference<reference_torch_scaler>(GetParam(), scaling, 1000.0, 11);
}

TEST_P(LossScaling, MegatronRuleOverRandomOverflows) {
  loss_scaling scaling = megatron_loss_scaling();
  for (const std::uint32_t hysteresis : {1u, 2u, 3u}) {
    scaling.growth_interval = 5;
    scaling.hysteresis = hysteresis;
    expect_reference<reference_megatron_scaler>(GetParam(), scaling, 0x1p20, 20 + hysteresis);
  }
  // A minimum that the scale reaches.
  scaling.hysteresis = 1;
  scaling.minimum = 3000.0;
  expect_reference<reference_megatron_scaler>(GetParam(), scaling, 0x1p14, 31);
}

TEST_P(LossScaling, CountersAreTheReferencesAfterEveryStep) {
  loss_scaling scaling = megatron_loss_scaling();
  scaling.growth_interval = 3;
  test_problem problem = uniform_problem({.name = "group"}, 1.0f, 1.0f);
  problem.options.loss_scale = 256.0;
  problem.options.scaling = scaling;
  const auto adapter = make(problem);
  reference_megatron_scaler scaler(256.0f, scaling);
  for (const bool bad : overflows(41)) {
    adapter->write_gradient(
        0, std::vector{bad ? std::numeric_limits<float>::quiet_NaN() : scaler.scale});
    adapter->launch();
    EXPECT_EQ(adapter->get().status().loss_scale, static_cast<double>(scaler.scale));
    scaler.update(bad);
    const loss_scale_state found = adapter->get().status().next_loss_scale;
    ASSERT_EQ(found.scale, scaler.scale);
    ASSERT_EQ(found.growth_tracker, static_cast<std::uint32_t>(scaler.growth_tracker));
    ASSERT_EQ(found.hysteresis_left, scaler.hysteresis_tracker);
  }
}

// An input that says so is as good as a gradient that is not finite.
TEST_P(LossScaling, FoundInfInputBacksOffWithoutANorm) {
  test_problem problem = uniform_problem({.name = "group"}, 1.0f, 1.0f);
  problem.options.loss_scale = 64.0;
  problem.options.scaling.rule = loss_scale_rule::torch_amp;
  problem.inputs = {{input_kind::found_inf}};
  const auto adapter = make(problem);
  for (const auto& [found_inf, expected] :
       {std::pair{0.0f, 64.0f}, {1.0f, 32.0f}, {0.5f, 16.0f}, {0.0f, 16.0f}}) {
    adapter->write_input(0, found_inf);
    adapter->launch();
    EXPECT_EQ(adapter->get().status().next_loss_scale.scale, expected);
  }
}

TEST_P(LossScaling, ScaleByHandReachesTheNextStepAndTheRuleGoesOnFromIt) {
  test_problem problem = uniform_problem({.name = "group"}, 1.0f, 1.0f);
  problem.options.loss_scale = 64.0;
  problem.options.scaling.rule = loss_scale_rule::torch_amp;
  problem.options.scaling.growth_interval = 2;
  const auto adapter = make(problem);
  adapter->launch();
  adapter->get().set_loss_scale(1000.0);
  adapter->launch();
  EXPECT_EQ(adapter->get().status().loss_scale, 1000.0);
  EXPECT_EQ(adapter->get().status().next_loss_scale.scale, 2000.0f) << "the counter stays";
}

TEST_P(LossScaling, StepSkippedForItsNormCountsAsFinite) {
  test_problem problem = uniform_problem({.name = "group"}, 1.0f, 640.0f);
  problem.options.loss_scale = 64.0;
  problem.options.skip_above_norm = 5.0;
  problem.options.scaling.rule = loss_scale_rule::torch_amp;
  const auto adapter = make(problem);
  adapter->launch(3);
  EXPECT_EQ(adapter->get().status().skipped, 3u);
  EXPECT_EQ(adapter->get().status().next_loss_scale.scale, 64.0f);
  EXPECT_EQ(adapter->get().status().next_loss_scale.growth_tracker, 3u);
}

}  // namespace
}  // namespace stepgraph::test
