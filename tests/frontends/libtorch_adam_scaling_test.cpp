// Loss scaling, norms, skips, inputs and records.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <sstream>

#include "common/expect_error.hpp"
#include "frontends/libtorch_testing.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/schedule.hpp"

namespace stepgraph::test {
namespace {

class AdamScaling : public on_device {
 protected:
  torch::Tensor parameter_with_gradient(double value = 1.0, double gradient = 1.0,
                                        int64_t size = 5) const {
    const torch::Tensor result = constant_parameter(value, device(), size);
    set_gradient(result, gradient);
    return result;
  }

  torch::Tensor scalar(double value) const {
    return torch::full({}, value, torch::TensorOptions(device()).dtype(torch::kFloat));
  }

  static double value_of(const torch::Tensor& tensor) { return tensor.item<double>(); }
};
STEPGRAPH_ON_EVERY_DEVICE(AdamScaling);

loss_scaling growing_every(std::uint32_t interval) {
  return {.rule = loss_scale_rule::torch_amp, .growth_interval = interval};
}

TEST_P(AdamScaling, DynamicScaleFollowsOverflowsWithoutTheHost) {
  const torch::Tensor p = constant_parameter(1.0, device());
  const torch::Tensor still = constant_parameter(1.0, device());
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().loss_scale(1024.0).scaling(growing_every(2)));
  Adam reference({still}, AdamOptions(0.1));
  const std::vector<double> factors = {1.0, 2.0, INFINITY, 3.0, 1.0, -1.0};
  const std::vector<double> scales = {1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 2048.0};
  for (std::size_t step = 0; step < factors.size(); ++step) {
    const torch::Tensor scale = optimizer.loss_scale_tensor();
    EXPECT_EQ(scale.dim(), 0);
    EXPECT_EQ(scale.device().type(), GetParam());
    EXPECT_EQ(value_of(scale), scales[step]) << "step " << step;
    optimizer.zero_grad();
    ((p * factors[step]).sum() * scale).backward();
    optimizer.step();
    if (std::isfinite(factors[step])) {
      reference.zero_grad();
      (still * factors[step]).sum().backward();
      reference.step();
    }
  }
  // Scales are powers of two: unscaling is exact.
  expect_same_bits(p, still);
  const step_status status = optimizer.status();
  EXPECT_EQ(status.step, 5u);
  EXPECT_EQ(status.skipped, 1u);
  EXPECT_EQ(status.next_loss_scale.scale, 2048.0f);
  EXPECT_EQ(status.next_loss_scale.growth_tracker, 1u);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamScaling, MegatronRuleHasHysteresis) {
  const torch::Tensor p = parameter_with_gradient(1.0, INFINITY);
  loss_scaling scaling = megatron_loss_scaling();
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().loss_scale(8.0).scaling(scaling));
  optimizer.step();
  EXPECT_EQ(value_of(optimizer.loss_scale_tensor()), 8.0);
  EXPECT_EQ(optimizer.status().next_loss_scale.hysteresis_left, 1);
  optimizer.step();
  EXPECT_EQ(value_of(optimizer.loss_scale_tensor()), 4.0);
  EXPECT_EQ(optimizer.status().skipped, 2u);
}

TEST_P(AdamScaling, ScaleTensorIsTheMemoryOfTheStep) {
  const torch::Tensor p = parameter_with_gradient(1.0, 2.0);
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().loss_scale(2.0).scaling(growing_every(1)));
  EXPECT_EQ(value_of(optimizer.loss_scale_tensor()), 2.0);
  optimizer.step();
  const torch::Tensor scale = optimizer.loss_scale_tensor();
  EXPECT_EQ(value_of(scale), 4.0);
  optimizer.step();
  EXPECT_EQ(value_of(scale), 8.0);
  EXPECT_EQ(optimizer.loss_scale_tensor().data_ptr(), scale.data_ptr());
}

TEST_P(AdamScaling, ScaleSetByHandIsTheOneOfTheNextStep) {
  const torch::Tensor p = parameter_with_gradient(1.0, 1.0);
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().loss_scale(2.0));
  optimizer.set_loss_scale(4.0);
  EXPECT_EQ(value_of(optimizer.loss_scale_tensor()), 4.0);
  optimizer.step();
  EXPECT_EQ(optimizer.status().loss_scale, 4.0);
  optimizer.set_loss_scale(16.0);
  EXPECT_EQ(value_of(optimizer.loss_scale_tensor()), 16.0);
  EXPECT_EQ(optimizer.status().next_loss_scale.scale, 16.0f);
  optimizer.step();
  EXPECT_EQ(optimizer.status().loss_scale, 16.0);
  EXPECT_EQ(value_of(optimizer.loss_scale_tensor()), 16.0);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamScaling, ScaleAndCountersSurviveABuild) {
  const torch::Tensor p = parameter_with_gradient(1.0, 2.0);
  Adam optimizer({p}, AdamOptions(0.1),
                 StepOptions().loss_scale(2.0).scaling(growing_every(2)).samples_per_step(10));
  optimizer.step();
  optimizer.step();
  optimizer.step();
  const torch::Tensor kept = optimizer.loss_scale_tensor();
  set_gradient(p, INFINITY);
  optimizer.add_param_group(OptimizerParamGroup({parameter_with_gradient(1.0, 4.0)}));
  EXPECT_EQ(value_of(optimizer.loss_scale_tensor()), 4.0);
  optimizer.step();
  step_status status = optimizer.status();
  EXPECT_EQ(optimizer.captures(), 2u);
  EXPECT_EQ(status.loss_scale, 4.0);
  EXPECT_EQ(status.next_loss_scale.scale, 2.0f);
  EXPECT_EQ(status.skipped, 1u);
  EXPECT_EQ(status.samples, 30u);
  // The old executor's memory is still there.
  EXPECT_EQ(value_of(kept), 4.0);
  set_gradient(p, 2.0);
  optimizer.step();
  status = optimizer.status();
  EXPECT_EQ(status.next_loss_scale.growth_tracker, 1u);
  EXPECT_EQ(status.step, 4u);
  EXPECT_EQ(status.groups.at(0).step, 4u);
  EXPECT_EQ(status.groups.at(1).step, 1u);
}

TEST_P(AdamScaling, ScaleTensorMayOutliveTheOptimizer) {
  torch::Tensor scale;
  {
    Adam optimizer({parameter_with_gradient()}, AdamOptions(0.1), StepOptions().loss_scale(2.0));
    optimizer.step();
    scale = optimizer.loss_scale_tensor();
  }
  EXPECT_EQ(value_of(scale), 2.0);
}

TEST_P(AdamScaling, UnscaledGradientsAreLeftClipped) {
  const torch::Tensor p = parameter_with_gradient(1.0, 8.0, 4);  // unscaled 2, norm 4
  Adam optimizer({p}, AdamOptions(0.1),
                 StepOptions().loss_scale(4.0).max_grad_norm(2.0).unscale_gradients(true));
  optimizer.step();
  expect_elements(p.grad(), 1.0, 1e-5);
  EXPECT_DOUBLE_EQ(optimizer.status().grad_norm, 4.0);
}

TEST_P(AdamScaling, NormAboveTheThresholdSkips) {
  const torch::Tensor p = parameter_with_gradient(1.0, 1.0, 4);  // norm 2
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().skip_above_norm(1.9));
  optimizer.step();
  expect_elements(p, 1.0, 0.0);
  EXPECT_EQ(optimizer.status().skipped, 1u);
  EXPECT_FALSE(optimizer.status().found_inf);
  optimizer.set_skip_above_norm(2.0);
  optimizer.step();
  expect_elements(p, 0.9, 1e-6);
  EXPECT_EQ(optimizer.status().groups.at(0).step, 1u);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamScaling, ThresholdSetLaterMeasuresTheNorm) {
  const torch::Tensor p = parameter_with_gradient(1.0, 1.0, 4);
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  optimizer.set_skip_above_norm(1.0);
  optimizer.step();
  EXPECT_EQ(optimizer.status().skipped, 1u);
  EXPECT_EQ(optimizer.status().step, 1u);
  EXPECT_EQ(optimizer.captures(), 2u);
}

TEST_P(AdamScaling, MeasuresNormAndZerosWithoutUsingThem) {
  const torch::Tensor p = parameter_with_gradient(1.0, 0.0, 4);
  p.grad()[1].fill_(-3.0);
  p.grad()[2].fill_(2.0);
  Adam l2({p}, AdamOptions(0.1), StepOptions().measure_norm(true).count_zeros(true));
  l2.step();
  EXPECT_DOUBLE_EQ(l2.status().grad_norm, std::sqrt(13.0));
  EXPECT_EQ(l2.status().zeros, 2u);
  Adam largest({p}, AdamOptions(0.1), StepOptions().measure_norm(true).norm(norm_kind::infinity));
  largest.step();
  EXPECT_DOUBLE_EQ(largest.status().grad_norm, 3.0);
}

TEST_P(AdamScaling, FoundInfInputSkipsUnlessItIsZero) {
  const torch::Tensor p = parameter_with_gradient();
  const torch::Tensor found_inf = torch::zeros({1}, torch::TensorOptions(device()));
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().found_inf(found_inf));
  std::uint64_t skipped = 0;
  for (const double value : {1.0, 2.0, 0.5, std::nan("")}) {
    found_inf.fill_(value);
    optimizer.step();
    EXPECT_EQ(optimizer.status().skipped, ++skipped) << value;
  }
  expect_elements(p, 1.0, 0.0);
  found_inf.zero_();
  optimizer.step();
  expect_elements(p, 0.9, 1e-6);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamScaling, LossScaleInputIsReadAtEveryStep) {
  const torch::Tensor p = parameter_with_gradient(1.0, 8.0);
  const torch::Tensor scale = scalar(8.0);
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().loss_scale_input(scale).measure_norm(true));
  EXPECT_TRUE(optimizer.loss_scale_tensor().is_same(scale));
  optimizer.step();
  EXPECT_DOUBLE_EQ(optimizer.status().grad_norm, std::sqrt(5.0));
  scale.fill_(2.0);
  optimizer.step();
  EXPECT_DOUBLE_EQ(optimizer.status().grad_norm, 4.0 * std::sqrt(5.0));
  EXPECT_EQ(optimizer.status().loss_scale, 2.0);
  expect_error<usage_error>([&] { optimizer.set_loss_scale(2.0); }, {"loss_scale_input"});
}

TEST_P(AdamScaling, LearningRateTensorReachesTheNextStep) {
  const torch::Tensor p = parameter_with_gradient();
  const torch::Tensor q = parameter_with_gradient();
  const torch::Tensor rate = scalar(0.1);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{p},
                      std::make_unique<AdamOptions>(AdamOptions(7.0).lr_tensor(rate)));
  groups.emplace_back(std::vector{q});
  Adam optimizer(groups, AdamOptions(0.2));
  optimizer.step();
  expect_elements(p, 0.9, 1e-6);
  expect_elements(q, 0.8, 1e-6);
  rate.fill_(0.05);
  optimizer.step();
  expect_elements(p, 0.85, 1e-6);
  // As torch's schedulers do.
  optimizer.param_groups()[0].options().set_lr(0.25);
  EXPECT_EQ(value_of(rate), 0.25);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25);
  optimizer.step();
  expect_elements(p, 0.6, 1e-6);
  EXPECT_EQ(optimizer.captures(), 1u);
}

TEST_P(AdamScaling, AnotherLearningRateTensorBuildsTheStepAnew) {
  const torch::Tensor p = parameter_with_gradient();
  torch::Tensor rate = scalar(0.1);
  Adam optimizer({p}, AdamOptions().lr_tensor(rate));
  optimizer.step();
  rate.set_data(scalar(0.2));
  optimizer.step();
  expect_elements(p, 0.7, 1e-6);
  static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).lr_tensor(scalar(0.3));
  optimizer.step();
  expect_elements(p, 0.4, 1e-6);
  EXPECT_EQ(optimizer.captures(), 3u);
  EXPECT_EQ(optimizer.status().step, 3u);
}

TEST_P(AdamScaling, InputsAreHeld) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions().lr_tensor(scalar(0.1)), StepOptions().found_inf(scalar(0.0)));
  optimizer.step();
  std::vector<torch::Tensor> reused;
  for (int i = 0; i < 100; ++i) reused.push_back(scalar(7.0));
  optimizer.step();
  expect_elements(p, 0.8, 1e-6);
}

TEST_P(AdamScaling, InputsMustBeOneFloat) {
  const torch::Tensor p = parameter_with_gradient();
  const auto with_found_inf = [&](const torch::Tensor& input) {
    Adam optimizer({p}, AdamOptions(0.1), StepOptions().found_inf(input));
    optimizer.step();
  };
  const auto on_this_device = torch::TensorOptions(device());
  expect_error<usage_error>([&] { with_found_inf(torch::zeros({2}, on_this_device)); },
                            {"found_inf", "2 elements", "one Float"});
  expect_error<usage_error>(
      [&] { with_found_inf(torch::zeros({}, on_this_device.dtype(torch::kHalf))); },
      {"found_inf", "Half"});
  expect_error<usage_error>(
      [&] { Adam({p}, AdamOptions().lr_tensor(torch::zeros({0}, on_this_device))); },
      {"lr_tensor", "0 elements"});
  expect_error<usage_error>(
      [&] {
        Adam({p}, AdamOptions(),
             StepOptions().loss_scale_input(scalar(1.0)).scaling(growing_every(2)));
      },
      {"loss_scale_input", "fixed"});
  if (GetParam() == torch::kCUDA) {
    expect_error<usage_error>([&] { with_found_inf(torch::zeros({})); },
                              {"found_inf", "cpu", "cuda"});
  }
}

TEST_P(AdamScaling, RecordsTellEveryStepInOrder) {
  const torch::Tensor p = parameter_with_gradient(1.0, 2.0, 4);
  Adam optimizer({p}, AdamOptions(0.1),
                 StepOptions().skip_non_finite(true).record_capacity(8).samples_per_step(2));
  EXPECT_TRUE(optimizer.records().records.empty());
  optimizer.step();
  set_gradient(p, INFINITY);
  optimizer.step();
  static_cast<void>(optimizer.status());  // waits, so that the records are there
  record_batch batch = optimizer.records();
  ASSERT_EQ(batch.records.size(), 2u);
  EXPECT_EQ(batch.overwritten, 0u);
  EXPECT_EQ(batch.records[0].launch, 1u);
  EXPECT_FALSE(batch.records[0].was_skipped);
  EXPECT_DOUBLE_EQ(batch.records[0].grad_norm, 4.0);
  EXPECT_EQ(batch.records[0].groups.at(0).learning_rate, 0.1);
  EXPECT_TRUE(batch.records[1].was_skipped);
  EXPECT_TRUE(batch.records[1].found_inf);
  EXPECT_EQ(batch.records[1].step, 1u);
  EXPECT_EQ(batch.records[1].samples, 2u);
  EXPECT_TRUE(optimizer.records().records.empty());
  // Through a build, and no more than the ring holds.
  set_gradient(p, 1.0);
  optimizer.step();
  optimizer.add_param_group(OptimizerParamGroup({parameter_with_gradient()}));
  for (int step = 0; step < 10; ++step) optimizer.step();
  static_cast<void>(optimizer.status());
  batch = optimizer.records();
  EXPECT_EQ(batch.records.size() + batch.overwritten, 11u);
  ASSERT_GE(batch.records.size(), 9u);
  EXPECT_EQ(batch.records.front().launch, 3u);
  EXPECT_EQ(batch.records.front().groups.size(), 1u);
  EXPECT_EQ(batch.records.back().launch, 13u);
  EXPECT_EQ(batch.records.back().step, 12u);
  EXPECT_EQ(batch.records.back().groups.size(), 2u);
}

TEST_P(AdamScaling, NoRecordsUnlessAskedFor) {
  Adam optimizer({parameter_with_gradient()}, AdamOptions(0.1));
  optimizer.step();
  EXPECT_TRUE(optimizer.records().records.empty());
}

}  // namespace
}  // namespace stepgraph::test
