#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "frontends/libtorch_testing.hpp"
#include "stepgraph/host_executor.hpp"
#include "stepgraph/step_builder.hpp"

namespace stepgraph::test {
namespace {

class AdamNumbers : public on_device {};
STEPGRAPH_ON_EVERY_DEVICE(AdamNumbers);

const std::vector<std::vector<int64_t>> shapes = {{3, 5}, {1}, {0}, {4099}, {2, 3, 4, 5}};

/// Steps our optimizer and torch's, which works in f64 on copies, with the same gradients.
template <class TorchOptimizer, class TorchOptions>
void expect_agreement_with_torch(torch::Device device, const AdamOptions& options,
                                 torch::ScalarType type = torch::kFloat) {
  std::vector<torch::Tensor> ours;
  std::vector<torch::Tensor> theirs;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    ours.push_back(make_parameter(random_values(shapes[i], i), device, type));
    theirs.push_back(make_parameter(ours.back().detach().cpu(), torch::kCPU, torch::kDouble));
  }
  Adam optimizer(ours, options);
  TorchOptimizer reference(theirs, TorchOptions(options.lr())
                                       .betas(options.betas())
                                       .eps(options.eps())
                                       .weight_decay(options.weight_decay()));
  for (std::uint64_t step = 0; step < 20; ++step) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      set_gradient(ours[i], random_values(shapes[i], 100 * (step + 1) + i));
      set_gradient(theirs[i], ours[i].grad());
    }
    optimizer.step();
    reference.step();
  }
  EXPECT_EQ(optimizer.captures(), 1u);
  EXPECT_EQ(optimizer.status().groups.at(0).step, 20u);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const AdamParamState& state = state_of(optimizer, ours[i]);
    const torch::Tensor updated = state.master().defined() ? state.master() : ours[i];
    EXPECT_LT(relative_difference(updated, theirs[i]), 1e-6) << "tensor " << i;
    EXPECT_EQ(state.exp_avg().scalar_type(), torch::kFloat);
    EXPECT_EQ(state.exp_avg_sq().scalar_type(), torch::kFloat);
    expect_same_bits(ours[i], updated.to(type));
  }
}

TEST_P(AdamNumbers, DecoupledAgreesWithTorchAdamW) {
  expect_agreement_with_torch<torch::optim::AdamW, torch::optim::AdamWOptions>(
      device(), AdamOptions(1e-2).weight_decay(0.1));
}

TEST_P(AdamNumbers, L2AgreesWithTorchAdam) {
  expect_agreement_with_torch<torch::optim::Adam, torch::optim::AdamOptions>(
      device(),
      AdamOptions(1e-2).mode(weight_decay_mode::l2).weight_decay(0.1).betas({0.8, 0.95}).eps(1e-5));
}

TEST_P(AdamNumbers, Bf16WithMastersAgreesWithTorchAdamW) {
  expect_agreement_with_torch<torch::optim::AdamW, torch::optim::AdamWOptions>(
      device(), AdamOptions(1e-2).weight_decay(0.1).master_weights(true), torch::kBFloat16);
}

TEST_P(AdamNumbers, F16WithMastersAgreesWithTorchAdam) {
  expect_agreement_with_torch<torch::optim::Adam, torch::optim::AdamOptions>(
      device(),
      AdamOptions(1e-2).weight_decay(0.1).mode(weight_decay_mode::l2).master_weights(true),
      torch::kHalf);
}

TEST_P(AdamNumbers, F32ParametersGetNoMaster) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 1.0);
  Adam optimizer({p}, AdamOptions().master_weights(true));
  optimizer.step();
  EXPECT_FALSE(state_of(optimizer, p).master().defined());
}

TEST_P(AdamNumbers, GradientsMayHaveAnotherFormatThanParameters) {
  // 16 ones, bf16 gradient of ones, lr 1e-3.
  const torch::Tensor p = constant_parameter(1.0, device(), 16);
  const torch::Tensor q = make_parameter(torch::ones({16}), device(), torch::kBFloat16);
  const torch::Tensor gradient = torch::ones({16}, torch::TensorOptions(device()));
  Adam optimizer({p, q}, AdamOptions(1e-3).master_weights(true));
  // set_data of a gradient would refuse another type: assign below autograd.
  p.unsafeGetTensorImpl()->mutable_grad() = gradient.to(torch::kBFloat16);
  q.unsafeGetTensorImpl()->mutable_grad() = gradient;
  optimizer.step();
  expect_elements(p, 0.999, 1e-6);
  expect_elements(state_of(optimizer, q).master(), 0.999, 1e-6);
}

TEST_P(AdamNumbers, GroupsUseTheirOwnOptions) {
  const std::vector<torch::Tensor> ours = {make_parameter(random_values({7}, 1), device()),
                                           make_parameter(random_values({9}, 2), device())};
  const std::vector<torch::Tensor> theirs = {make_parameter(random_values({7}, 1), torch::kCPU),
                                             make_parameter(random_values({9}, 2), torch::kCPU)};
  std::vector<OptimizerParamGroup> our_groups;
  our_groups.emplace_back(std::vector{ours[0]},
                          std::make_unique<AdamOptions>(AdamOptions(1e-2).weight_decay(0.3)));
  our_groups.emplace_back(std::vector{ours[1]});
  std::vector<OptimizerParamGroup> their_groups;
  their_groups.emplace_back(std::vector{theirs[0]},
                            std::make_unique<torch::optim::AdamWOptions>(
                                torch::optim::AdamWOptions(1e-2).weight_decay(0.3)));
  their_groups.emplace_back(std::vector{theirs[1]});
  Adam optimizer(our_groups, AdamOptions(1e-3).betas({0.7, 0.9}));
  torch::optim::AdamW reference(
      their_groups, torch::optim::AdamWOptions(1e-3).betas({0.7, 0.9}).weight_decay(0.0));
  for (std::uint64_t step = 0; step < 20; ++step) {
    for (std::size_t i = 0; i < 2; ++i) {
      set_gradient(ours[i], random_values(ours[i].sizes(), 10 * step + i));
      set_gradient(theirs[i], random_values(ours[i].sizes(), 10 * step + i));
    }
    optimizer.step();
    reference.step();
  }
  for (std::size_t i = 0; i < 2; ++i) EXPECT_LT(relative_difference(ours[i], theirs[i]), 2e-6);
}

TEST_P(AdamNumbers, WeightDecayModesAtLargeAndSmallParameters) {
  const auto updated = [&](double p, double g, double wd, weight_decay_mode mode) {
    const torch::Tensor parameter = constant_parameter(p, device());
    set_gradient(parameter, g);
    Adam optimizer({parameter}, AdamOptions(0.1).weight_decay(wd).mode(mode));
    optimizer.step();
    return std::pair(parameter, state_of(optimizer, parameter));
  };
  using enum weight_decay_mode;
  expect_elements(updated(10.0, -0.5, 0.1, l2).first, 9.9, 1e-5);
  expect_elements(updated(10.0, -0.5, 0.1, decoupled).first, 10.0, 1e-5);
  const auto [p_l2, state_l2] = updated(1.0, 0.5, 0.1, l2);
  expect_elements(p_l2, 0.9, 1e-6);
  expect_elements(state_l2.exp_avg(), 0.06, 1e-8);
  expect_elements(state_l2.exp_avg_sq(), 3.6e-4, 1e-9);
  const auto [p_decoupled, state_decoupled] = updated(1.0, 0.5, 0.1, decoupled);
  expect_elements(p_decoupled, 0.89, 1e-6);
  expect_elements(state_decoupled.exp_avg(), 0.05, 1e-8);
  expect_elements(state_decoupled.exp_avg_sq(), 2.5e-4, 1e-9);
}

TEST_P(AdamNumbers, MaximizeFollowsTheGradient) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 1.0);
  Adam optimizer({p}, AdamOptions(0.1).maximize(true));
  optimizer.step();
  expect_elements(p, 1.1, 1e-6);
}

TEST_P(AdamNumbers, WithoutBiasCorrectionTheFirstStepIsLarger) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 1.0);
  Adam optimizer({p}, AdamOptions(0.1).bias_correction(false));
  optimizer.step();
  expect_elements(p, 1.0 - 0.1 * 0.1 / (std::sqrt(0.001) + 1e-8), 1e-6);
}

TEST_P(AdamNumbers, BiasCorrectionAdvancesWithEveryStep) {
  for (const auto& [steps, expected] :
       std::vector<std::pair<int, double>>{{2, 0.8}, {3, 0.7}, {10, 1e-8}}) {
    const torch::Tensor p = constant_parameter(1.0, device());
    set_gradient(p, 1.0);
    Adam optimizer({p}, AdamOptions(0.1));
    for (int i = 0; i < steps; ++i) optimizer.step();
    expect_elements(p, expected, 1e-6);
  }
}

TEST_P(AdamNumbers, SameBitsAsTheHostExecutor) {
  const int64_t size = 5000;
  const torch::Tensor p = make_parameter(random_values({size}, 1), device());
  Adam optimizer({p}, AdamOptions(1e-2).weight_decay(0.1), StepOptions().max_grad_norm(1.0));

  torch::Tensor core_p = random_values({size}, 1);
  torch::Tensor core_g = torch::zeros({size});
  torch::Tensor core_m = torch::zeros({size});
  torch::Tensor core_v = torch::zeros({size});
  const auto view = [](const torch::Tensor& tensor) {
    return tensor_view{
        tensor.data_ptr(), static_cast<std::uint64_t>(tensor.numel()), storage_format::f32, {}};
  };
  step_builder builder;
  builder.set_options({.max_grad_norm = 1.0});
  const group_id group = builder.add_group({.learning_rate = 1e-2, .weight_decay = 0.1});
  builder.add_tensor(group, {.name = "p",
                             .parameter = view(core_p),
                             .gradient = view(core_g),
                             .exp_avg = view(core_m),
                             .exp_avg_sq = view(core_v)});
  host_executor core(builder.build());

  for (std::uint64_t step = 0; step < 10; ++step) {
    const torch::Tensor gradient = random_values({size}, 50 + step);
    set_gradient(p, gradient);
    core_g.copy_(gradient);
    optimizer.step();
    core.launch();
  }
  expect_same_bits(p, core_p);
  expect_same_bits(state_of(optimizer, p).exp_avg(), core_m);
  expect_same_bits(state_of(optimizer, p).exp_avg_sq(), core_v);
}

TEST_P(AdamNumbers, ClipsTheGlobalNorm) {
  const torch::Tensor p = constant_parameter(1.0, device(), 1);
  const torch::Tensor q = constant_parameter(1.0, device(), 1);
  set_gradient(p, 3.0);
  set_gradient(q, 4.0);
  Adam optimizer({p, q}, AdamOptions(0.1), StepOptions().max_grad_norm(1.0));
  optimizer.step();
  const step_status status = optimizer.status();
  EXPECT_DOUBLE_EQ(status.grad_norm, 5.0);
  EXPECT_NEAR(status.clip_coefficient, 0.2, 1e-6);
  expect_elements(state_of(optimizer, p).exp_avg(), 0.06, 1e-6);
  expect_elements(state_of(optimizer, q).exp_avg(), 0.08, 1e-6);
}

TEST_P(AdamNumbers, UnscalesGradientsOnce) {
  const torch::Tensor p = constant_parameter(1.0, device());
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().loss_scale(65536.0));
  set_gradient(p, 1e-3 * 65536.0);
  optimizer.step();
  expect_elements(p, 0.900001, 1e-6);
  expect_elements(state_of(optimizer, p).exp_avg(), 1e-4, 1e-9);
  optimizer.set_loss_scale(2.0);
  set_gradient(p, 2e-3);
  optimizer.step();
  expect_elements(state_of(optimizer, p).exp_avg(), 1.9e-4, 1e-9);
}

TEST_P(AdamNumbers, SkipsStepsWithNonFiniteGradients) {
  const torch::Tensor p = constant_parameter(1.0, device());
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().skip_non_finite(true));
  for (const double g : {1.0, double{INFINITY}, 1.0}) {
    set_gradient(p, g);
    const torch::Tensor before = p.detach().clone();
    optimizer.step();
    const step_status status = optimizer.status();
    EXPECT_EQ(status.last_skipped, std::isinf(g));
    if (std::isinf(g)) expect_same_bits(p, before);
  }
  expect_elements(p, 0.8, 1e-6);
  const step_status status = optimizer.status();
  EXPECT_EQ(status.groups.at(0).step, 2u);
  EXPECT_EQ(status.step, 2u);
  EXPECT_EQ(status.skipped, 1u);
  EXPECT_EQ(state_of(optimizer, p).step(), 2);
}

TEST_P(AdamNumbers, ZeroGradientsLeavesZeros) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 1.0);
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().zero_gradients(true));
  optimizer.step();
  expect_elements(p, 0.9, 1e-6);
  expect_elements(p.grad(), 0.0, 0.0);
}

TEST_P(AdamNumbers, ChannelsLastParametersUpdateInTheirOwnLayout) {
  const torch::Tensor values = random_values({2, 3, 4, 5}, 1);
  const torch::Tensor gradient = random_values({2, 3, 4, 5}, 2);
  const torch::Tensor plain = make_parameter(values, device());
  const torch::Tensor channels_last =
      make_parameter(values.contiguous(torch::MemoryFormat::ChannelsLast), device());
  ASSERT_FALSE(channels_last.is_contiguous());
  Adam optimizer({plain, channels_last}, AdamOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    set_gradient(plain, gradient);
    set_gradient(channels_last, gradient);
    optimizer.step();
  }
  expect_same_bits(channels_last, plain);
  expect_same_bits(state_of(optimizer, channels_last).exp_avg(),
                   state_of(optimizer, plain).exp_avg());
}

}  // namespace
}  // namespace stepgraph::test
