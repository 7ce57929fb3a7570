#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stepgraph/libtorch/adam.hpp"
#include "stepgraph/libtorch/cuda_backend.hpp"

namespace stepgraph::test {

using libtorch::Adam;
using libtorch::AdamOptions;
using libtorch::AdamParamState;
using libtorch::StepOptions;
using torch::optim::OptimizerParamGroup;

/// A suite that runs once on the CPU and, as Gpu/..., once on CUDA.
class on_device : public ::testing::TestWithParam<torch::DeviceType> {
 protected:
  void SetUp() override {
    // Also on the CPU, since torch remembers the first time it looks for CUDA.
    std::string why_not;
    const bool has_cuda = libtorch::load_torch_cuda_backend(&why_not);
    if (GetParam() == torch::kCUDA && !has_cuda) GTEST_SKIP() << why_not;
  }

  torch::Device device() const { return torch::Device(GetParam()); }
};

#define STEPGRAPH_ON_EVERY_DEVICE(suite)                                           \
  INSTANTIATE_TEST_SUITE_P(Cpu, suite, ::testing::Values(torch::DeviceType::CPU)); \
  INSTANTIATE_TEST_SUITE_P(Gpu, suite, ::testing::Values(torch::DeviceType::CUDA))

/// The same numbers for the same seed on every device.
inline torch::Tensor random_values(at::IntArrayRef sizes, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(sizes, generator, torch::kFloat);
}

/// A parameter, not yet with a gradient.
inline torch::Tensor make_parameter(const torch::Tensor& values, torch::Device device,
                                    torch::ScalarType type = torch::kFloat) {
  return values.to(device, type, /*non_blocking=*/false, /*copy=*/true).requires_grad_(true);
}

/// A parameter of equal elements.
inline torch::Tensor constant_parameter(double value, torch::Device device, int64_t size = 5) {
  return make_parameter(torch::full({size}, value, torch::kFloat), device);
}

/// Stores `values` into the gradient, in place if there is one.
inline void set_gradient(const torch::Tensor& parameter, const torch::Tensor& values) {
  const torch::NoGradGuard no_grad;
  if (!parameter.grad().defined()) {
    parameter.mutable_grad() = torch::empty_like(parameter);
  }
  parameter.mutable_grad().copy_(values);
}

inline void set_gradient(const torch::Tensor& parameter, double value) {
  set_gradient(parameter, torch::full(parameter.sizes(), value, torch::kDouble));
}

inline std::vector<torch::Tensor> clones(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> result;
  for (const torch::Tensor& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

inline AdamParamState& state_of(Adam& optimizer, const torch::Tensor& parameter) {
  return static_cast<AdamParamState&>(
      *std::as_const(optimizer).state().at(parameter.unsafeGetTensorImpl()));
}

/// Largest difference of two tensors relative to the larger one's largest element.
inline double relative_difference(const torch::Tensor& actual, const torch::Tensor& expected) {
  const torch::Tensor a = actual.detach().to(torch::kCPU, torch::kDouble);
  const torch::Tensor e = expected.detach().to(torch::kCPU, torch::kDouble);
  if (a.sizes() != e.sizes()) return INFINITY;
  if (a.numel() == 0) return 0.0;
  return ((a - e).abs().max() / e.abs().max()).item<double>();
}

inline void expect_elements(const torch::Tensor& tensor, double expected, double tolerance) {
  const torch::Tensor values = tensor.detach().to(torch::kCPU, torch::kDouble);
  EXPECT_NEAR(values.min().item<double>(), expected, tolerance);
  EXPECT_NEAR(values.max().item<double>(), expected, tolerance);
}

inline void expect_same_bits(const torch::Tensor& actual, const torch::Tensor& expected) {
  EXPECT_TRUE(torch::equal(actual.detach().cpu(), expected.detach().cpu()))
      << "actual " << actual << "\nexpected " << expected;
}

}  // namespace stepgraph::test
