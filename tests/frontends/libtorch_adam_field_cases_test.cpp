// Reports from the field that a front end can show: scaling done twice or not at all, gradients
// that move, groups that stay behind, checkpoints that put scalars in the wrong place.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <sstream>

#include "frontends/libtorch_testing.hpp"
#include "stepgraph/schedule.hpp"

namespace stepgraph::test {
namespace {

class AdamFieldCases : public on_device {
 protected:
  torch::Tensor scalar(double value) const {
    return torch::full({}, value, torch::TensorOptions(device()).dtype(torch::kFloat));
  }
};
STEPGRAPH_ON_EVERY_DEVICE(AdamFieldCases);

std::string saved(const Adam& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load(Adam& optimizer, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::load(optimizer, stream);
}

constexpr double a_step_of_1e_3 = 0.900001;  // 1 - 0.1 * 1e-3 / (1e-3 + 1e-8)

/// As torch's GradScaler hands them over: scale and verdict in tensors.
struct scaler_tensors {
  torch::Tensor scale;
  torch::Tensor found_inf;

  StepOptions options() const { return StepOptions().loss_scale_input(scale).found_inf(found_inf); }
};

TEST_P(AdamFieldCases, A18ScaledGradientsAreUnscaledOnce) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 65536.0 * 1e-3);
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().loss_scale(65536.0));
  optimizer.step();
  expect_elements(p, a_step_of_1e_3, 1e-6);
}

TEST_P(AdamFieldCases, A18GradientsThatAreUnscaledAlreadyAreNotUnscaledAgain) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 65536.0 * 1e-3);
  const scaler_tensors scaler{scalar(65536.0), scalar(0.0)};
  Adam optimizer({p}, AdamOptions(0.1), scaler.options());
  // What GradScaler::unscale_ does, in place.
  p.mutable_grad().div_(scaler.scale);
  scaler.scale.fill_(1.0);
  optimizer.step();
  expect_elements(p, a_step_of_1e_3, 1e-6);
}

TEST_P(AdamFieldCases, A18AStepThatLeavesGradientsUnscaledDoesSoOnce) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 65536.0 * 1e-3);
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().loss_scale(65536.0).unscale_gradients(true));
  optimizer.step();
  expect_elements(p, a_step_of_1e_3, 1e-6);
  expect_elements(p.grad(), 1e-3, 1e-9);
}

TEST_P(AdamFieldCases, A18AnInfinityLeavesEveryBit) {
  const torch::Tensor p = make_parameter(random_values({50}, 1), device());
  const scaler_tensors scaler{scalar(65536.0), scalar(0.0)};
  Adam optimizer({p}, AdamOptions(0.1), scaler.options().skip_non_finite(true));
  set_gradient(p, random_values({50}, 2));
  optimizer.step();
  const AdamParamState& state = state_of(optimizer, p);
  const std::vector<torch::Tensor> before = clones({p, state.exp_avg(), state.exp_avg_sq()});
  const auto expect_untouched = [&](std::uint64_t skipped) {
    optimizer.step();
    expect_same_bits(p, before[0]);
    expect_same_bits(state.exp_avg(), before[1]);
    expect_same_bits(state.exp_avg_sq(), before[2]);
    EXPECT_EQ(optimizer.status().groups.at(0).step, 1u);
    EXPECT_EQ(optimizer.status().skipped, skipped);
  };
  p.mutable_grad()[17].fill_(INFINITY);
  expect_untouched(1);
  // The same said by the scaler alone.
  set_gradient(p, 1.0);
  scaler.found_inf.fill_(1.0);
  expect_untouched(2);
}

TEST_P(AdamFieldCases, A23FreshGradientsAtNewAddressesAreTheOnesUsed) {
  const torch::Tensor p = make_parameter(random_values({64}, 1), device());
  const torch::Tensor still = make_parameter(random_values({64}, 1), device());
  Adam optimizer({p}, AdamOptions(0.01));
  Adam reference({still}, AdamOptions(0.01));
  std::vector<torch::Tensor> old_gradients;  // alive, so that new ones lie elsewhere, and poisoned
  for (std::uint64_t step = 0; step < 5; ++step) {
    if (step > 0) {
      old_gradients.push_back(p.grad());
      optimizer.zero_grad(/*set_to_none=*/true);
      old_gradients.back().fill_(std::nan(""));
    }
    const torch::Tensor weights = random_values({64}, 10 + step).to(device());
    (p * weights).sum().backward();
    set_gradient(still, weights);
    optimizer.step();
    reference.step();
  }
  expect_same_bits(p, still);
  EXPECT_EQ(optimizer.captures(), 1u);
  EXPECT_EQ(optimizer.rebinds(), 4u);
}

TEST_P(AdamFieldCases, A27EmptyGroupsAreAtTheSameStep) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 1.0);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{p});
  groups.emplace_back(std::vector<torch::Tensor>{});
  Adam optimizer(groups, AdamOptions(0.1));
  for (int step = 0; step < 3; ++step) optimizer.step();
  Adam resumed(groups, AdamOptions(0.1));
  load(resumed, saved(optimizer));
  for (Adam* each : {&optimizer, &resumed}) {
    const step_status status = each->status();
    ASSERT_EQ(status.groups.size(), 2u);
    EXPECT_EQ(status.groups[0].step, 3u);
    EXPECT_EQ(status.groups[1].step, 3u);
  }
}

/// A training with everything that a checkpoint must bring back.
struct scaled_training {
  torch::Tensor parameter;
  torch::Tensor rate;
  std::unique_ptr<Adam> optimizer;

  explicit scaled_training(torch::Device device)
      : parameter(make_parameter(random_values({300}, 1), device, torch::kHalf)),
        rate(torch::full({}, 0.02, torch::TensorOptions(device).dtype(torch::kFloat))) {
    const schedule decay = schedules::table({0.5, 0.4, 0.3, 0.2, 0.1}, schedule_clock::samples);
    optimizer = std::make_unique<Adam>(
        std::vector{parameter},
        AdamOptions().lr_tensor(rate).weight_decay_schedule(decay).master_weights(true),
        StepOptions()
            .loss_scale(256.0)
            .scaling({.rule = loss_scale_rule::torch_amp, .growth_interval = 3})
            .max_grad_norm(3.0)
            .samples_per_step(1));
  }

  /// Steps 4 and 9 overflow.
  void run(int from, int to) {
    for (int step = from; step < to; ++step) {
      const torch::Tensor scale = optimizer->loss_scale_tensor();
      const torch::Tensor weights =
          random_values({300}, 100 + static_cast<std::uint64_t>(step)).to(parameter.device());
      set_gradient(parameter, weights * scale * (step % 5 == 4 ? 1e6 : 1.0));
      optimizer->step();
    }
  }

  void copy_parameter_of(const scaled_training& other) const {
    const torch::NoGradGuard no_grad;
    parameter.copy_(other.parameter);
  }
};

void expect_same_training(scaled_training& actual, scaled_training& expected) {
  expect_same_bits(actual.parameter, expected.parameter);
  const AdamParamState& a = state_of(*actual.optimizer, actual.parameter);
  const AdamParamState& e = state_of(*expected.optimizer, expected.parameter);
  expect_same_bits(a.master(), e.master());
  expect_same_bits(a.exp_avg(), e.exp_avg());
  expect_same_bits(a.exp_avg_sq(), e.exp_avg_sq());
  expect_same_bits(actual.rate, expected.rate);
  const step_status s = actual.optimizer->status();
  const step_status t = expected.optimizer->status();
  EXPECT_EQ(s.step, t.step);
  EXPECT_EQ(s.skipped, t.skipped);
  EXPECT_EQ(s.samples, t.samples);
  EXPECT_EQ(s.next_loss_scale.scale, t.next_loss_scale.scale);
  EXPECT_EQ(s.next_loss_scale.growth_tracker, t.next_loss_scale.growth_tracker);
  EXPECT_EQ(s.groups.at(0).step, t.groups.at(0).step);
  EXPECT_EQ(s.groups.at(0).weight_decay, t.groups.at(0).weight_decay);
}

/// Saved after `saved_after` steps, loaded by a training that has made `steps_before_load`.
void expect_resume_equals_uninterrupted_run(torch::Device saved_on, torch::Device device,
                                            int saved_after, int steps_before_load) {
  scaled_training uninterrupted(device);
  uninterrupted.run(0, 12);
  scaled_training first(saved_on);
  first.run(0, saved_after);
  const std::string bytes = saved(*first.optimizer);
  first.rate.fill_(9.0);  // the checkpoint's own, not this tensor

  scaled_training resumed(device);
  resumed.run(0, steps_before_load);
  resumed.rate.fill_(5.0);
  const void* rate = resumed.rate.data_ptr();
  const std::uint64_t captures = resumed.optimizer->captures();
  resumed.copy_parameter_of(first);
  load(*resumed.optimizer, bytes);
  EXPECT_EQ(resumed.rate.data_ptr(), rate);
  EXPECT_EQ(resumed.rate.device().type(), device.type());
  const step_status status = resumed.optimizer->status();
  EXPECT_EQ(status.step + status.skipped, static_cast<std::uint64_t>(saved_after));
  resumed.run(saved_after, 12);
  expect_same_training(resumed, uninterrupted);
  if (steps_before_load > 0) {
    EXPECT_EQ(resumed.optimizer->captures(), captures);
  }
}

TEST_P(AdamFieldCases, A28CheckpointOfTheCpuResumesHere) {
  expect_resume_equals_uninterrupted_run(torch::kCPU, device(), 7, 0);
}

TEST_P(AdamFieldCases, A28CheckpointLoadedIntoARunningStepReachesTheNextOne) {
  expect_resume_equals_uninterrupted_run(device(), device(), 7, 3);
}

TEST_P(AdamFieldCases, A28CheckpointRightAfterASkippedStep) {
  // Step 4, the fifth, overflows.
  expect_resume_equals_uninterrupted_run(device(), device(), 5, 0);
  expect_resume_equals_uninterrupted_run(torch::kCPU, device(), 5, 2);
}

TEST_P(AdamFieldCases, A28OverflowOfTheVeryFirstStep) {
  scaled_training training(device());
  set_gradient(training.parameter, INFINITY);
  training.optimizer->step();
  scaled_training resumed(device());
  load(*resumed.optimizer, saved(*training.optimizer));
  const step_status status = resumed.optimizer->status();
  EXPECT_EQ(status.step, 0u);
  EXPECT_EQ(status.skipped, 1u);
  EXPECT_EQ(status.next_loss_scale.scale, 128.0f);
  EXPECT_EQ(state_of(*resumed.optimizer, resumed.parameter).step(), 0);
  training.run(1, 4);
  resumed.run(1, 4);
  expect_same_training(resumed, training);
}

TEST_P(AdamFieldCases, A28CountersOfAnotherRuleStartAfresh) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 1.0);
  Adam first({p}, AdamOptions(0.1),
             StepOptions().loss_scale(8.0).scaling({.rule = loss_scale_rule::torch_amp}));
  first.step();
  Adam second({p}, AdamOptions(0.1), StepOptions().scaling(megatron_loss_scaling()));
  load(second, saved(first));
  const loss_scale_state scale = second.status().next_loss_scale;
  EXPECT_EQ(scale.scale, 8.0f);
  EXPECT_EQ(scale.growth_tracker, 0u);
  EXPECT_EQ(scale.hysteresis_left, 2);
}

}  // namespace
}  // namespace stepgraph::test
