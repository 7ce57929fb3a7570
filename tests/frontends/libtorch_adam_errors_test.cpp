#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "common/expect_error.hpp"
#include "frontends/libtorch_testing.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::test {
namespace {

class AdamErrors : public on_device {
 protected:
  /// Two parameters with gradients of one.
  std::vector<torch::Tensor> two_parameters() const {
    std::vector<torch::Tensor> result = {constant_parameter(1.0, device()),
                                         constant_parameter(1.0, device())};
    for (const torch::Tensor& parameter : result) set_gradient(parameter, 1.0);
    return result;
  }
};
STEPGRAPH_ON_EVERY_DEVICE(AdamErrors);

TEST_P(AdamErrors, MissingGradientAtTheFirstStepNamesTheParameter) {
  const auto parameters = two_parameters();
  parameters[1].mutable_grad() = torch::Tensor();
  Adam optimizer(parameters);
  expect_error<usage_error>([&] { optimizer.step(); }, {"group 0 parameter 1", "no gradient"});
  EXPECT_EQ(optimizer.captures(), 0u);
}

TEST_P(AdamErrors, MessagesUseTheUsersNames) {
  const auto parameters = two_parameters();
  parameters[1].mutable_grad() = torch::Tensor();
  Adam optimizer(parameters, {}, StepOptions().names({"layer.weight", "layer.bias"}));
  expect_error<usage_error>([&] { optimizer.step(); }, {"layer.bias", "no gradient"});
}

TEST_P(AdamErrors, ParametersBeyondTheNamesGetNumbers) {
  const auto parameters = two_parameters();
  parameters[1].mutable_grad() = torch::Tensor();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{parameters[0]});
  groups.emplace_back(std::vector{parameters[1]});
  Adam optimizer(groups, {}, StepOptions().names({"weight"}));
  expect_error<usage_error>([&] { optimizer.step(); }, {"group 1 parameter 0"});
}

TEST_P(AdamErrors, FrozenParameterIsToldToStayOut) {
  const torch::Tensor frozen = torch::ones({3}, torch::TensorOptions(device()));
  Adam optimizer({frozen});
  expect_error<usage_error>([&] { optimizer.step(); }, {"does not require", "frozen"});
}

TEST_P(AdamErrors, GradientLostBetweenStepsIsNeverTheOldBuffer) {
  const auto parameters = two_parameters();
  Adam optimizer(parameters, AdamOptions(0.1));
  optimizer.step();
  const auto before = clones(parameters);
  const torch::Tensor kept = parameters[0].grad();
  optimizer.zero_grad(/*set_to_none=*/true);
  expect_error<usage_error>([&] { optimizer.step(); }, {"group 0 parameter 0", "no gradient"});
  for (std::size_t i = 0; i < 2; ++i) expect_same_bits(parameters[i], before[i]);

  // Fresh gradients at new addresses, of other values: the first ones are still alive.
  for (const torch::Tensor& parameter : parameters) set_gradient(parameter, -1.0);
  ASSERT_NE(parameters[0].grad().data_ptr(), kept.data_ptr());
  optimizer.step();
  // The new sign reaches the moments: p grows back a little instead of shrinking to .8.
  const double m_hat = (0.9 * 0.1 - 0.1) / (1 - 0.81);
  for (const torch::Tensor& parameter : parameters) {
    expect_elements(parameter, 0.9 - 0.1 * m_hat, 1e-6);
  }
  EXPECT_EQ(optimizer.captures(), 1u);
  EXPECT_GE(optimizer.rebinds(), 1u);
}

TEST_P(AdamErrors, SparseGradient) {
  const torch::Tensor p = constant_parameter(1.0, device());
  p.mutable_grad() =
      torch::sparse_coo_tensor(torch::tensor({{1}}), torch::tensor({1.0f}), {5}, torch::kFloat)
          .to(device());
  Adam optimizer({p}, {}, StepOptions().names({"embedding"}));
  expect_error<usage_error>([&] { optimizer.step(); }, {"embedding", "gradient", "sparse"});
}

TEST_P(AdamErrors, NonContiguousGradient) {
  const torch::Tensor p = make_parameter(torch::ones({4, 3}), device());
  p.mutable_grad() = torch::ones({3, 4}, torch::TensorOptions(device())).t();
  Adam optimizer({p});
  expect_error<usage_error>([&] { optimizer.step(); },
                            {"group 0 parameter 0", "gradient", "not contiguous"});
  p.mutable_grad() = torch::ones({4, 6}, torch::TensorOptions(device())).slice(1, 0, 6, 2);
  expect_error<usage_error>([&] { optimizer.step(); },
                            {"group 0 parameter 0", "gradient", "not contiguous"});
  p.mutable_grad() = torch::ones({4, 3}, torch::TensorOptions(device()));
  optimizer.step();
}

TEST_P(AdamErrors, NonContiguousParameter) {
  const torch::Tensor whole = torch::ones({4, 6}, torch::TensorOptions(device()));
  const torch::Tensor p = whole.slice(1, 0, 6, 2).detach().requires_grad_(true);
  p.mutable_grad() = torch::ones({4, 3}, torch::TensorOptions(device()));
  Adam optimizer({p});
  expect_error<usage_error>([&] { optimizer.step(); }, {"parameter", "not contiguous", "strides"});
}

TEST_P(AdamErrors, GradientThatBecomesNonContiguousLater) {
  const torch::Tensor p = make_parameter(torch::ones({4, 3}), device());
  set_gradient(p, 1.0);
  Adam optimizer({p});
  optimizer.step();
  const torch::Tensor dense = p.grad();
  p.mutable_grad() = torch::ones({3, 4}, torch::TensorOptions(device())).t();
  expect_error<usage_error>([&] { optimizer.step(); }, {"gradient", "not contiguous"});
  p.mutable_grad() = dense;
  optimizer.step();
  EXPECT_EQ(optimizer.status().step, 2u);
}

TEST_P(AdamErrors, UnsupportedTypes) {
  const torch::Tensor p = make_parameter(torch::ones({4}), device(), torch::kDouble);
  set_gradient(p, 1.0);
  Adam of_double({p});
  expect_error<usage_error>([&] { of_double.step(); }, {"parameter has type Double", "BFloat16"});

  const torch::Tensor q = make_parameter(torch::ones({4}), device());
  q.unsafeGetTensorImpl()->mutable_grad() =
      torch::ones({4}, torch::TensorOptions(device()).dtype(torch::kDouble));
  Adam of_double_gradient({q});
  expect_error<usage_error>([&] { of_double_gradient.step(); }, {"gradient has type Double"});
}

TEST_P(AdamErrors, GradientOfOtherSizes) {
  const torch::Tensor p = make_parameter(torch::ones({4}), device());
  p.unsafeGetTensorImpl()->mutable_grad() = torch::ones({5}, torch::TensorOptions(device()));
  Adam optimizer({p});
  expect_error<usage_error>([&] { optimizer.step(); }, {"gradient has sizes [5]", "[4]"});
}

TEST_P(AdamErrors, ParameterThatChangesItsSize) {
  const torch::Tensor p = make_parameter(torch::ones({4}), device());
  set_gradient(p, 1.0);
  Adam optimizer({p});
  optimizer.step();
  p.set_data(torch::ones({6}, torch::TensorOptions(device())));
  p.mutable_grad() = torch::Tensor();
  set_gradient(p, 1.0);
  expect_error<usage_error>([&] { optimizer.step(); },
                            {"group 0 parameter 0", "6 elements", "expected 4"});
}

TEST_P(AdamErrors, UndefinedParameter) {
  Adam optimizer({constant_parameter(1.0, device())});
  optimizer.param_groups()[0].params().emplace_back();
  set_gradient(optimizer.param_groups()[0].params()[0], 1.0);
  expect_error<usage_error>([&] { optimizer.step(); }, {"group 0 parameter 1", "undefined"});
}

TEST_P(AdamErrors, TheSameParameterTwice) {
  const torch::Tensor p = constant_parameter(1.0, device());
  set_gradient(p, 1.0);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{p});
  groups.emplace_back(std::vector{p});
  Adam optimizer(groups);
  expect_error<usage_error>([&] { optimizer.step(); },
                            {"group 1 parameter 0", "group 0 parameter 0"});
}

TEST_P(AdamErrors, OptionsOfAnotherOptimizer) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{constant_parameter(1.0, device())},
                      std::make_unique<torch::optim::AdamWOptions>());
  expect_error<usage_error>([&] { Adam optimizer(groups); }, {"group 0", "AdamOptions"});
}

TEST_P(AdamErrors, OptionsAreCheckedAtConstruction) {
  const torch::Tensor p = constant_parameter(1.0, device());
  expect_error<usage_error>([&] { Adam optimizer({p}, AdamOptions(-1.0)); }, {"learning_rate"});
  expect_error<usage_error>(
      [&] {
        Adam optimizer({p}, AdamOptions().betas({0.9, 1.0}));
      },
      {"beta2"});
  expect_error<usage_error>([&] { Adam optimizer({p}, AdamOptions().eps(NAN)); }, {"eps"});
  expect_error<usage_error>([&] { Adam optimizer({p}, {}, StepOptions().loss_scale(0.0)); },
                            {"loss_scale"});
}

TEST_P(AdamErrors, RefusedLearningRateLeavesEverythingAndIsRefusedAgain) {
  const auto parameters = two_parameters();
  Adam optimizer(parameters, AdamOptions(0.1));
  optimizer.step();
  const auto before = clones(parameters);
  optimizer.param_groups()[0].options().set_lr(NAN);
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_error<usage_error>([&] { optimizer.step(); }, {"group 0", "learning_rate"});
    for (std::size_t i = 0; i < 2; ++i) expect_same_bits(parameters[i], before[i]);
  }
  optimizer.param_groups()[0].options().set_lr(0.05);
  optimizer.step();
  for (const torch::Tensor& parameter : parameters) expect_elements(parameter, 0.85, 1e-6);
  EXPECT_EQ(optimizer.status().step, 2u);
}

TEST_P(AdamErrors, AnErrorInTheClosureChangesNothing) {
  const auto parameters = two_parameters();
  Adam optimizer(parameters, AdamOptions(0.1));
  optimizer.step();
  const auto before = clones(parameters);
  EXPECT_THROW(optimizer.step([]() -> torch::Tensor { throw std::runtime_error("no data"); }),
               std::runtime_error);
  for (std::size_t i = 0; i < 2; ++i) expect_same_bits(parameters[i], before[i]);
  EXPECT_EQ(optimizer.status().step, 1u);
}

TEST_P(AdamErrors, ContinuesAfterARefusedStepAsIfItHadNotBeen) {
  const auto run = [&](bool with_error) {
    const torch::Tensor p = make_parameter(random_values({100}, 1), device());
    const torch::Tensor q = make_parameter(random_values({30}, 2), device());
    Adam optimizer({p, q}, AdamOptions(0.01).weight_decay(0.1));
    for (std::uint64_t step = 0; step < 6; ++step) {
      set_gradient(p, random_values({100}, 10 + step));
      set_gradient(q, random_values({30}, 20 + step));
      if (with_error && step % 2 == 1) {
        // The first parameter's gradient moves, the second's is missing.
        p.mutable_grad() = p.grad().clone();
        const torch::Tensor gradient = q.grad();
        q.mutable_grad() = torch::Tensor();
        EXPECT_THROW(optimizer.step(), usage_error);
        q.mutable_grad() = gradient;
      }
      optimizer.step();
    }
    EXPECT_EQ(optimizer.status().step, 6u);
    return std::pair(p, q);
  };
  const auto plain = run(false);
  const auto interrupted = run(true);
  expect_same_bits(interrupted.first, plain.first);
  expect_same_bits(interrupted.second, plain.second);
}

TEST_P(AdamErrors, PlanAndScheduleNeedWhatTheyAreAbout) {
  const auto parameters = two_parameters();
  Adam optimizer(parameters);
  expect_error<usage_error>([&] { optimizer.plan(); }, {"plan", "prepare"});
  expect_error<usage_error>([&] { optimizer.resume_schedule(0); }, {"group 0", "no schedule"});
  expect_error<usage_error>([&] { optimizer.resume_schedule(1); }, {"group 1", "does not exist"});
  optimizer.prepare();
  EXPECT_EQ(optimizer.plan().tensors.size(), 2u);
}

class GpuAdamErrors : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!libtorch::load_torch_cuda_backend(&why_not)) GTEST_SKIP() << why_not;
  }
};

TEST_F(GpuAdamErrors, MixedDevices) {
  const torch::Tensor p = constant_parameter(1.0, torch::kCPU);
  const torch::Tensor q = constant_parameter(1.0, torch::kCUDA);
  set_gradient(p, 1.0);
  set_gradient(q, 1.0);
  Adam optimizer({p, q});
  expect_error<usage_error>([&] { optimizer.step(); }, {"group 0 parameter 1", "cuda:0", "cpu"});
}

TEST_F(GpuAdamErrors, ParameterMovedAfterTheFirstStep) {
  const torch::Tensor p = constant_parameter(1.0, torch::kCPU);
  set_gradient(p, 1.0);
  Adam optimizer({p});
  optimizer.step();
  p.unsafeGetTensorImpl()->mutable_grad() = torch::Tensor();
  p.set_data(p.detach().to(torch::kCUDA));
  set_gradient(p, 1.0);
  expect_error<usage_error>([&] { optimizer.step(); }, {"moved to cuda:0", "cpu"});
}

TEST_F(GpuAdamErrors, ParameterMovedBeforeTheFirstStepIsFine) {
  const torch::Tensor p = constant_parameter(1.0, torch::kCPU);
  Adam optimizer({p}, AdamOptions(0.1));
  p.set_data(p.detach().to(torch::kCUDA));
  set_gradient(p, 1.0);
  optimizer.step();
  expect_elements(p, 0.9, 1e-6);
}

TEST(CudaBackend, SaysWhyItIsNotThere) {
  std::string why_not;
  const bool loaded = libtorch::load_torch_cuda_backend(&why_not);
  EXPECT_EQ(loaded, why_not.empty());
  EXPECT_EQ(loaded, torch::cuda::is_available());
  std::string again;
  EXPECT_EQ(libtorch::load_torch_cuda_backend(&again), loaded);
  EXPECT_EQ(again, why_not);
  EXPECT_EQ(libtorch::load_torch_cuda_backend(), loaded);
}

}  // namespace
}  // namespace stepgraph::test
