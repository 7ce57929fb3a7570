#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "common/expect_error.hpp"
#include "frontends/libtorch_testing.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/megatron_schedules.hpp"

namespace stepgraph::test {
namespace {

class AdamChanges : public on_device {
 protected:
  torch::Tensor parameter_with_gradient(double value = 1.0, double gradient = 1.0) const {
    const torch::Tensor result = constant_parameter(value, device());
    set_gradient(result, gradient);
    return result;
  }
};
STEPGRAPH_ON_EVERY_DEVICE(AdamChanges);

/// The base learning rates times a factor, from the bases each time.
class factor_scheduler : public torch::optim::LRScheduler {
 public:
  factor_scheduler(torch::optim::Optimizer& optimizer, double factor)
      : LRScheduler(optimizer), factor_(factor), bases_(get_current_lrs()) {}

 private:
  std::vector<double> get_lrs() override {
    std::vector<double> result;
    for (const double base : bases_) result.push_back(base * factor_);
    return result;
  }

  double factor_;
  std::vector<double> bases_;
};

TEST_P(AdamChanges, SchedulerWithAFactorNeverCompounds) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  factor_scheduler scheduler(optimizer, 0.5);
  for (int step = 0; step < 3; ++step) {
    scheduler.step();
    optimizer.step();
    EXPECT_DOUBLE_EQ(optimizer.status().groups.at(0).learning_rate, 0.05);
  }
  expect_elements(p, 1.0 - 3 * 0.05, 1e-6);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamChanges, TorchSchedulersReachEveryGroup) {
  const torch::Tensor p = parameter_with_gradient();
  const torch::Tensor q = parameter_with_gradient();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{p});
  groups.emplace_back(std::vector{q}, std::make_unique<AdamOptions>(0.2));
  Adam optimizer(groups, AdamOptions(0.1));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  double expected_p = 1.0;
  double expected_q = 1.0;
  double factor = 1.0;
  for (int step = 0; step < 5; ++step) {
    optimizer.step();
    expected_p -= 0.1 * factor;
    expected_q -= 0.2 * factor;
    scheduler.step();
    if (step > 0) factor *= 0.5;  // torch's StepLR leaves its first call out
    expect_elements(p, expected_p, 1e-6);
    expect_elements(q, expected_q, 1e-6);
  }
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamChanges, EveryHyperparameterAssignedByHandReachesTheNextStep) {
  const torch::Tensor ours = make_parameter(random_values({50}, 1), device());
  const torch::Tensor theirs = make_parameter(random_values({50}, 1), torch::kCPU, torch::kDouble);
  Adam optimizer({ours}, AdamOptions(0.1));
  torch::optim::AdamW reference({theirs}, torch::optim::AdamWOptions(0.1).weight_decay(0.0));
  for (int step = 0; step < 12; ++step) {
    auto& options = static_cast<AdamOptions&>(optimizer.param_groups()[0].options());
    auto& expected =
        static_cast<torch::optim::AdamWOptions&>(reference.param_groups()[0].options());
    if (step == 2) {
      options.lr(0.03);
      expected.lr(0.03);
    } else if (step == 4) {
      options.betas({0.5, 0.6});
      expected.betas({0.5, 0.6});
    } else if (step == 6) {
      options.eps(0.3);
      expected.eps(0.3);
    } else if (step == 8) {
      options.weight_decay(0.4);
      expected.weight_decay(0.4);
    }
    set_gradient(ours, random_values({50}, 10 + static_cast<std::uint64_t>(step)));
    set_gradient(theirs, ours.grad());
    optimizer.step();
    reference.step();
    EXPECT_LT(relative_difference(ours, theirs), 1e-6) << "step " << step;
  }
  EXPECT_EQ(optimizer.captures(), 1u);
  EXPECT_EQ(optimizer.rebinds(), 0u);
}

TEST_P(AdamChanges, WeightDecayWarmUpIsNotFrozen) {
  const torch::Tensor p = parameter_with_gradient(1.0, 0.0);
  Adam optimizer({p}, AdamOptions(0.1));
  for (int t = 1; t <= 4; ++t) {
    static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).weight_decay(0.1 * t);
    optimizer.step();
  }
  expect_elements(p, 0.903450, 1e-6);
}

TEST_P(AdamChanges, OtherOptionsBuildTheStepAnewAndKeepCounts) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).maximize(true);
  set_gradient(p, -1.0);
  optimizer.step();
  expect_elements(p, 0.8, 1e-6);
  EXPECT_EQ(optimizer.captures(), 2u);
  EXPECT_EQ(optimizer.status().step, 2u);
  EXPECT_EQ(optimizer.status().groups.at(0).step, 2u);
}

schedule cosine() {
  return schedules::megatron_learning_rate(
      {.style = schedules::megatron_learning_rate_style::cosine,
       .maximum = 0.1,
       .minimum = 0.01,
       .warmup = 2,
       .decay = 10,
       .clock = schedule_clock::updates});
}

TEST_P(AdamChanges, DeviceScheduleRunsByItself) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(123.0).schedule(cosine()));
  double expected = 1.0;
  for (std::uint64_t step = 0; step < 12; ++step) {
    optimizer.step();
    const double lr = value_at(cosine(), step);
    EXPECT_DOUBLE_EQ(optimizer.status().groups.at(0).learning_rate, lr);
    expected -= lr;
  }
  expect_elements(p, expected, 1e-5);
}

TEST_P(AdamChanges, LearningRateByHandHoldsOverTheScheduleUntilResumed) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(123.0).schedule(cosine()));
  const auto learning_rate_of_next_step = [&] {
    optimizer.step();
    return optimizer.status().groups.at(0).learning_rate;
  };
  EXPECT_EQ(learning_rate_of_next_step(), value_at(cosine(), 0));
  optimizer.param_groups()[0].options().set_lr(0.5);
  EXPECT_EQ(learning_rate_of_next_step(), 0.5);
  EXPECT_EQ(learning_rate_of_next_step(), 0.5);
  // Also when the step is built anew meanwhile.
  const torch::Tensor q = parameter_with_gradient();
  optimizer.add_param_group(OptimizerParamGroup({q}));
  EXPECT_EQ(learning_rate_of_next_step(), 0.5);
  optimizer.resume_schedule(0);
  EXPECT_EQ(learning_rate_of_next_step(), value_at(cosine(), 4));
  EXPECT_EQ(learning_rate_of_next_step(), value_at(cosine(), 5));
}

schedule rising_weight_decay() {
  return schedules::megatron_weight_decay({.style = schedules::megatron_weight_decay_style::linear,
                                           .start = 0.0,
                                           .end = 0.4,
                                           .increment = 4,
                                           .clock = schedule_clock::updates});
}

TEST_P(AdamChanges, WeightDecayScheduleRunsByItself) {
  const torch::Tensor p = parameter_with_gradient(1.0, 0.0);
  Adam optimizer({p},
                 AdamOptions(0.1).weight_decay(9.0).weight_decay_schedule(rising_weight_decay()));
  double expected = 1.0;
  for (std::uint64_t step = 0; step < 6; ++step) {
    optimizer.step();
    const double decay = value_at(rising_weight_decay(), step);
    EXPECT_DOUBLE_EQ(optimizer.status().groups.at(0).weight_decay, decay);
    expected *= 1.0 - 0.1 * decay;
  }
  expect_elements(p, expected, 1e-6);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamChanges, WeightDecayByHandHoldsOverTheScheduleUntilResumed) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1).weight_decay_schedule(rising_weight_decay()));
  const auto weight_decay_of_next_step = [&] {
    optimizer.step();
    return optimizer.status().groups.at(0).weight_decay;
  };
  EXPECT_EQ(weight_decay_of_next_step(), value_at(rising_weight_decay(), 0));
  static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).weight_decay(0.7);
  EXPECT_EQ(weight_decay_of_next_step(), 0.7);
  // Also when the step is built anew meanwhile.
  optimizer.add_param_group(OptimizerParamGroup({parameter_with_gradient()}));
  EXPECT_EQ(weight_decay_of_next_step(), 0.7);
  optimizer.resume_weight_decay_schedule(0);
  EXPECT_EQ(weight_decay_of_next_step(), value_at(rising_weight_decay(), 3));
}

TEST_P(AdamChanges, AnotherScheduleBuildsTheStepAnewAndRunsFromTheSameClock) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1).schedule(cosine()));
  optimizer.step();
  optimizer.step();
  const schedule steeper = schedules::scaled(cosine(), 0.5);
  static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).schedule(steeper);
  optimizer.step();
  EXPECT_EQ(optimizer.status().groups.at(0).learning_rate, value_at(steeper, 2));
  EXPECT_EQ(optimizer.captures(), 2u);
}

TEST_P(AdamChanges, ScheduleBySamplesCountsWhatAppliedStepsConsume) {
  const torch::Tensor p = parameter_with_gradient();
  schedule by_samples = cosine();
  by_samples.clock = schedule_clock::samples;
  Adam optimizer({p}, AdamOptions(0.1).schedule(by_samples),
                 StepOptions().samples_per_step(3).skip_non_finite(true));
  optimizer.step();
  set_gradient(p, INFINITY);
  optimizer.step();
  set_gradient(p, 1.0);
  optimizer.step();
  EXPECT_EQ(optimizer.status().samples, 6u);
  EXPECT_EQ(optimizer.status().groups.at(0).learning_rate, value_at(by_samples, 3));
  optimizer.set_samples_per_step(1);
  optimizer.step();
  EXPECT_EQ(optimizer.status().samples, 7u);
  EXPECT_EQ(optimizer.status().groups.at(0).learning_rate, value_at(by_samples, 6));
}

TEST_P(AdamChanges, EmptyGroupsStepToo) {
  const torch::Tensor p = parameter_with_gradient();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{p});
  groups.emplace_back(std::vector<torch::Tensor>{});
  Adam optimizer(groups, AdamOptions(0.1));
  for (int step = 0; step < 3; ++step) optimizer.step();
  const step_status status = optimizer.status();
  ASSERT_EQ(status.groups.size(), 2u);
  EXPECT_EQ(status.groups[0].step, 3u);
  EXPECT_EQ(status.groups[1].step, 3u);
  expect_elements(p, 0.7, 1e-6);
}

TEST_P(AdamChanges, EmptyGroupsKeepTheirStepWhenTheStepIsBuiltAnew) {
  const torch::Tensor p = parameter_with_gradient();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{});
  groups.emplace_back(std::vector{p});
  Adam optimizer(groups, AdamOptions(0.1));
  for (int step = 0; step < 3; ++step) optimizer.step();
  optimizer.add_param_group(OptimizerParamGroup({parameter_with_gradient()}));
  optimizer.step();
  const step_status status = optimizer.status();
  EXPECT_EQ(status.groups.at(0).step, 4u);
  EXPECT_EQ(status.groups.at(1).step, 4u);
  EXPECT_EQ(status.groups.at(2).step, 1u);
  EXPECT_EQ(status.step, 4u);
}

TEST_P(AdamChanges, AnOptimizerWithoutParametersSteps) {
  Adam optimizer(std::vector<torch::Tensor>{});
  optimizer.step();
  EXPECT_EQ(optimizer.status().step, 1u);
  const torch::Tensor p = parameter_with_gradient();
  optimizer.add_param_group(OptimizerParamGroup({p}));
  optimizer.step();
  EXPECT_EQ(optimizer.status().step, 2u);
}

TEST_P(AdamChanges, AddedGroupStartsAtItsOwnFirstStep) {
  const std::vector<torch::Tensor> ours = {make_parameter(random_values({20}, 1), device()),
                                           make_parameter(random_values({30}, 2), device())};
  const std::vector<torch::Tensor> theirs = {
      make_parameter(random_values({20}, 1), torch::kCPU, torch::kDouble),
      make_parameter(random_values({30}, 2), torch::kCPU, torch::kDouble)};
  Adam optimizer({ours[0]}, AdamOptions(0.01).weight_decay(0.1));
  torch::optim::AdamW reference({theirs[0]}, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  for (std::uint64_t step = 0; step < 8; ++step) {
    if (step == 3) {
      optimizer.add_param_group(OptimizerParamGroup({ours[1]}));
      reference.add_param_group(OptimizerParamGroup({theirs[1]}));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      set_gradient(ours[i], random_values(ours[i].sizes(), 10 * step + i));
      set_gradient(theirs[i], random_values(ours[i].sizes(), 10 * step + i));
    }
    optimizer.step();
    reference.step();
  }
  EXPECT_EQ(optimizer.captures(), 2u);
  const step_status status = optimizer.status();
  EXPECT_EQ(status.step, 8u);
  EXPECT_EQ(status.groups.at(0).step, 8u);
  EXPECT_EQ(status.groups.at(1).step, 5u);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_LT(relative_difference(ours[i], theirs[i]), 1e-6);
}

TEST_P(AdamChanges, ParameterCannotJoinAGroupThatHasStepped) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  const torch::Tensor q = parameter_with_gradient();
  optimizer.param_groups()[0].params().push_back(q);
  expect_error<usage_error>([&] { optimizer.step(); },
                            {"group 0 parameter 1", "step 0", "group of their own"});
  optimizer.param_groups()[0].params().pop_back();
  optimizer.step();
  expect_elements(p, 0.8, 1e-6);
  EXPECT_EQ(optimizer.status().step, 2u);
}

TEST_P(AdamChanges, RemovedGroupLeavesTheOthersCountsAlone) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({parameter_with_gradient()}, AdamOptions(0.1));
  optimizer.step();
  optimizer.add_param_group(OptimizerParamGroup({p}));
  optimizer.step();
  optimizer.param_groups().erase(optimizer.param_groups().begin());
  optimizer.step();
  const step_status status = optimizer.status();
  ASSERT_EQ(status.groups.size(), 1u);
  EXPECT_EQ(status.groups[0].step, 2u);
  EXPECT_EQ(std::as_const(optimizer).state().size(), 1u);
  expect_elements(p, 0.8, 1e-6);
}

TEST_P(AdamChanges, MovedParametersAndGradientsAreReboundWithoutCapturingAgain) {
  const torch::Tensor p = make_parameter(random_values({100}, 1), device());
  const torch::Tensor still = make_parameter(random_values({100}, 1), device());
  Adam optimizer({p}, AdamOptions(0.01));
  Adam reference({still}, AdamOptions(0.01));
  std::vector<torch::Tensor> old_memory;  // so that nothing comes back to the same address
  for (std::uint64_t step = 0; step < 6; ++step) {
    const torch::Tensor gradient = random_values({100}, 10 + step);
    set_gradient(p, gradient);
    set_gradient(still, gradient);
    if (step == 2 || step == 4) {
      old_memory.push_back(p.detach());
      p.set_data(p.detach().clone());
    }
    if (step == 3 || step == 4) {
      old_memory.push_back(p.grad());
      p.mutable_grad() = p.grad().clone();
    }
    optimizer.step();
    reference.step();
  }
  expect_same_bits(p, still);
  EXPECT_EQ(optimizer.captures(), 1u);
  EXPECT_EQ(optimizer.rebinds(), 4u);
}

TEST_P(AdamChanges, GradientOfAnotherTypeBuildsTheStepAnew) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  p.unsafeGetTensorImpl()->mutable_grad() = p.grad().to(torch::kHalf);
  optimizer.step();
  expect_elements(p, 0.8, 1e-6);
  EXPECT_EQ(optimizer.captures(), 2u);
  EXPECT_EQ(optimizer.status().step, 2u);
}

TEST_P(AdamChanges, ParameterOfAnotherTypeKeepsItsState) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1).master_weights(true));
  optimizer.step();
  p.mutable_grad() = torch::Tensor();
  p.set_data(p.detach().to(torch::kBFloat16));
  set_gradient(p, 1.0);
  optimizer.step();
  EXPECT_EQ(optimizer.status().groups.at(0).step, 2u);
  EXPECT_EQ(optimizer.captures(), 2u);
  // The master starts from the rounded parameter.
  expect_elements(state_of(optimizer, p).master(), 0.8, 2e-3);
  EXPECT_EQ(state_of(optimizer, p).step(), 2);
}

TEST_P(AdamChanges, ParameterOfAnotherMemoryFormatKeepsItsNumbers) {
  const torch::Tensor values = random_values({2, 3, 4, 5}, 1);
  const torch::Tensor p = make_parameter(values, device());
  const torch::Tensor still = make_parameter(values, device());
  Adam optimizer({p, still}, AdamOptions(0.1));
  for (std::uint64_t step = 0; step < 4; ++step) {
    const torch::Tensor gradient = random_values({2, 3, 4, 5}, 2 + step);
    if (step == 2) {
      p.mutable_grad() = torch::Tensor();
      p.set_data(p.detach().contiguous(torch::MemoryFormat::ChannelsLast));
    }
    set_gradient(p, gradient);
    set_gradient(still, gradient);
    optimizer.step();
  }
  EXPECT_FALSE(p.is_contiguous());
  expect_same_bits(p, still);
}

TEST_P(AdamChanges, MemoryIsHeldUntilItIsReplaced) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  const auto is_alive = [](const c10::weak_intrusive_ptr<c10::StorageImpl>& storage) {
    return !storage.expired();
  };
  const auto storage_of = [](const torch::Tensor& tensor) {
    return c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
            tensor.storage().unsafeGetStorageImpl()));
  };
  const auto gradient = storage_of(p.grad());
  const auto values = storage_of(p);
  p.mutable_grad() = torch::Tensor();
  p.set_data(p.detach().clone());
  EXPECT_TRUE(is_alive(gradient));
  EXPECT_TRUE(is_alive(values));
  set_gradient(p, 1.0);
  optimizer.step();
  EXPECT_FALSE(is_alive(gradient));
  EXPECT_FALSE(is_alive(values));
  expect_elements(p, 0.8, 1e-6);
}

TEST_P(AdamChanges, TheOptimizerAloneKeepsEverythingAlive) {
  auto optimizer = std::make_unique<Adam>(
      std::vector{parameter_with_gradient(), parameter_with_gradient()}, AdamOptions(0.1));
  optimizer->step();
  std::vector<torch::Tensor> reused;
  for (int i = 0; i < 100; ++i) {
    reused.push_back(torch::full({5}, 7.0, torch::TensorOptions(device())));
  }
  for (int step = 0; step < 2; ++step) optimizer->step();
  for (const torch::Tensor& parameter : optimizer->parameters()) {
    expect_elements(parameter, 0.7, 1e-6);
  }
  for (const torch::Tensor& other : reused) expect_elements(other, 7.0, 0.0);
}

TEST_P(AdamChanges, ZeroGradKeepsAddressesByDefault) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  const void* address = p.grad().data_ptr();
  optimizer.zero_grad();
  ASSERT_TRUE(p.grad().defined());
  EXPECT_EQ(p.grad().data_ptr(), address);
  expect_elements(p.grad(), 0.0, 0.0);
  p.sum().backward();
  EXPECT_EQ(p.grad().data_ptr(), address);
  optimizer.step();
  EXPECT_EQ(optimizer.rebinds(), 0u);
  expect_elements(p, 0.8, 1e-6);
  optimizer.zero_grad(/*set_to_none=*/true);
  EXPECT_FALSE(p.grad().defined());
}

TEST_P(AdamChanges, TrainsThroughAutogradWithAClosure) {
  const torch::Tensor p = constant_parameter(1.0, device());
  Adam optimizer({p}, AdamOptions(0.05));
  torch::Tensor loss;
  for (int step = 0; step < 100; ++step) {
    const torch::NoGradGuard no_grad;
    loss = optimizer.step([&] {
      EXPECT_TRUE(torch::GradMode::is_enabled());
      optimizer.zero_grad();
      torch::Tensor value = (p - 3.0).square().sum();
      value.backward();
      return value;
    });
  }
  EXPECT_LT(loss.item<double>(), 1e-2);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamChanges, SetToNoneTrainsThroughRebinding) {
  const torch::Tensor p = constant_parameter(1.0, device());
  const torch::Tensor still = constant_parameter(1.0, device());
  Adam optimizer({p}, AdamOptions(0.05));
  Adam reference({still}, AdamOptions(0.05));
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad(/*set_to_none=*/true);
    (p - 3.0).square().sum().backward();
    optimizer.step();
    reference.zero_grad();
    (still - 3.0).square().sum().backward();
    reference.step();
  }
  expect_same_bits(p, still);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamChanges, AutogradSeesThatParametersChanged) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  const torch::Tensor loss = p.square().sum();
  optimizer.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST_P(AdamChanges, MaxGradNormSetLaterMeasuresTheNorm) {
  const torch::Tensor p = constant_parameter(1.0, device(), 4);
  set_gradient(p, 1.0);
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  EXPECT_EQ(optimizer.status().grad_norm, 0.0);
  optimizer.set_max_grad_norm(1.0);
  optimizer.step();
  EXPECT_DOUBLE_EQ(optimizer.status().grad_norm, 2.0);
  EXPECT_NEAR(optimizer.status().clip_coefficient, 0.5, 1e-6);
  EXPECT_EQ(optimizer.captures(), 2u);
  optimizer.set_max_grad_norm(0.5);
  optimizer.step();
  EXPECT_NEAR(optimizer.status().clip_coefficient, 0.25, 1e-6);
  EXPECT_EQ(optimizer.captures(), 2u);
  EXPECT_EQ(optimizer.status().step, 3u);
}

TEST_P(AdamChanges, SkippedStepsAreCountedAcrossBuilds) {
  const torch::Tensor p = parameter_with_gradient(1.0, INFINITY);
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().skip_non_finite(true));
  optimizer.step();
  const torch::Tensor q = parameter_with_gradient(1.0, INFINITY);
  optimizer.add_param_group(OptimizerParamGroup({q}));
  optimizer.step();
  EXPECT_EQ(optimizer.status().skipped, 2u);
  EXPECT_EQ(optimizer.status().step, 0u);
}

TEST_P(AdamChanges, StateTensorsMayBeAssigned) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  const torch::Tensor mine = torch::zeros({5}, torch::TensorOptions(device()));
  auto& entry = optimizer.state().at(p.unsafeGetTensorImpl());
  static_cast<AdamParamState&>(*entry).exp_avg(mine);
  optimizer.step();
  expect_elements(mine, 0.1, 1e-6);
  EXPECT_EQ(optimizer.captures(), 2u);
  EXPECT_EQ(optimizer.status().step, 2u);
}

TEST_P(AdamChanges, ClearedStateStartsOver) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  for (int step = 0; step < 3; ++step) optimizer.step();
  optimizer.state().clear();
  optimizer.step();
  EXPECT_EQ(optimizer.status().groups.at(0).step, 1u);
  expect_elements(state_of(optimizer, p).exp_avg(), 0.1, 1e-6);
}

TEST_P(AdamChanges, MovedOptimizerGoesOn) {
  const torch::Tensor p = parameter_with_gradient();
  Adam first({p}, AdamOptions(0.1));
  first.step();
  Adam second(std::move(first));
  second.step();
  expect_elements(p, 0.8, 1e-6);
  EXPECT_EQ(second.captures(), 1u);
}

TEST_P(AdamChanges, PrepareBuildsAndRunsNothing) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  EXPECT_EQ(optimizer.status().step, 0u);
  optimizer.prepare();
  optimizer.prepare();
  EXPECT_EQ(optimizer.captures(), 1u);
  EXPECT_EQ(optimizer.status().step, 0u);
  expect_elements(p, 1.0, 0.0);
  optimizer.deliver();
  optimizer.step();
  EXPECT_EQ(optimizer.captures(), 1u);
  expect_elements(p, 0.9, 1e-6);
}

TEST_P(AdamChanges, StateAddressesNeverChange) {
  const torch::Tensor p = make_parameter(torch::ones({10}), device(), torch::kBFloat16);
  set_gradient(p, 1.0);
  Adam optimizer({p}, AdamOptions(0.1).master_weights(true));
  optimizer.step();
  const AdamParamState before = state_of(optimizer, p);
  double lr = 0.1;
  for (int step = 0; step < 5; ++step) {
    optimizer.param_groups()[0].options().set_lr(lr *= 0.5);
    optimizer.step();
  }
  const AdamParamState& after = state_of(optimizer, p);
  EXPECT_EQ(after.exp_avg().data_ptr(), before.exp_avg().data_ptr());
  EXPECT_EQ(after.exp_avg_sq().data_ptr(), before.exp_avg_sq().data_ptr());
  EXPECT_EQ(after.master().data_ptr(), before.master().data_ptr());
}

}  // namespace
}  // namespace stepgraph::test
