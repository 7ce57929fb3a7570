#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "common/cuda_testing.hpp"
#include "common/executor_adapter.hpp"
#include "conformance/large_tensor.hpp"
#include "stepgraph/cuda/graph_executor.hpp"

// One tensor with more elements than 31 and 32 bits count. Needs a GPU with tens of gigabytes.
namespace stepgraph::test {
namespace {

constexpr update_signature small_formats = {storage_format::bf16, storage_format::bf16,
                                            storage_format::none, storage_format::f32,
                                            storage_format::f32};
constexpr palette parameters = {0x3f80, 0x4000, 0xbf00, 0x4080};  // 1, 2, -0.5, 4
constexpr palette ones = {0x3f80, 0x3f80, 0x3f80, 0x3f80};

/// What the host executor makes of the four parameters, and the moments that all elements share.
struct expected_state {
  palette codes;
  float exp_avg;
  float exp_avg_sq;
};

expected_state expect_of_host(int steps) {
  test_problem problem = uniform_problem({.learning_rate = 0.1}, 0.0f, 1.0f, small_formats, 4);
  std::memcpy(problem.contents[0][parameter_operand].data(), parameters.data(), 8);
  const auto adapter = make_adapter(executor_kind::host, problem);
  adapter->launch(steps);
  expected_state expected;
  std::memcpy(expected.codes.data(), adapter->read(0, parameter_operand).data(), 8);
  expected.exp_avg = adapter->values(0, exp_avg_operand)[0];
  expected.exp_avg_sq = adapter->values(0, exp_avg_sq_operand)[0];
  return expected;
}

class GpuLarge : public gpu_test, public ::testing::WithParamInterface<std::uint64_t> {};

INSTANTIATE_TEST_SUITE_P(GpuLarge, GpuLarge,
                         ::testing::Values((1ull << 31) + 4097, (1ull << 32) + 1),
                         [](const auto& tested) {
                           return std::to_string(tested.param) + "_elements";
                         });

TEST_P(GpuLarge, A14_EveryElementIsUpdatedOnceAStep) {
  const std::uint64_t numel = GetParam();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes));
  const std::size_t needed = numel * 12 + (1ull << 30);
  if (free_bytes < needed) {
    GTEST_SKIP() << "needs " << (needed >> 30) << " GiB of device memory, found "
                 << (free_bytes >> 30);
  }
  int device = 0;
  check(cudaGetDevice(&device));
  const device_buffer<std::uint16_t> parameter(numel);
  const device_buffer<std::uint16_t> gradient(numel);
  const device_buffer<float> exp_avg(numel);
  const device_buffer<float> exp_avg_sq(numel);
  check(fill(parameter.data(), numel, parameters));
  check(fill(gradient.data(), numel, ones));
  check(cudaMemset(exp_avg.data(), 0, numel * sizeof(float)));
  check(cudaMemset(exp_avg_sq.data(), 0, numel * sizeof(float)));

  const device_location here = {device_kind::cuda, device};
  step_builder builder;
  builder.set_options({.skip_non_finite = true});
  builder.add_group({.learning_rate = 0.1});
  builder.add_tensor(0,
                     {.name = "large",
                      .parameter = {parameter.data(), numel, storage_format::bf16, here},
                      .gradient = tensor_view{gradient.data(), numel, storage_format::bf16, here},
                      .exp_avg = {exp_avg.data(), numel, storage_format::f32, here},
                      .exp_avg_sq = {exp_avg_sq.data(), numel, storage_format::f32, here}});
  const cuda_stream stream;
  check(cudaDeviceSynchronize());
  graph_executor executor(builder.build(), stream.get());
  executor.launch(stream.get());
  executor.launch(stream.get());
  const step_status status = executor.status();
  EXPECT_EQ(status.step, 2u);
  EXPECT_NEAR(status.grad_norm / std::sqrt(static_cast<double>(numel)), 1.0, 1e-6);

  const expected_state expected = expect_of_host(2);
  const device_buffer<unsigned long long> unlike(std::vector<unsigned long long>(3, 0));
  check(count_unlike(parameter.data(), numel, expected.codes, unlike.data()));
  check(count_unlike(exp_avg.data(), numel, expected.exp_avg, unlike.data() + 1));
  check(count_unlike(exp_avg_sq.data(), numel, expected.exp_avg_sq, unlike.data() + 2));
  EXPECT_EQ(unlike.read(), (std::vector<unsigned long long>{0, 0, 0}));
  // The count is itself a kernel over a large tensor; look at some elements without it.
  constexpr std::uint64_t half = std::uint64_t{1} << 31;
  for (const std::uint64_t i : {std::uint64_t{0}, half - 1, half, half + 1, numel - 1}) {
    std::uint16_t code = 0;
    check(cudaMemcpy(&code, parameter.data() + i, sizeof(code), cudaMemcpyDeviceToHost));
    EXPECT_EQ(code, expected.codes[turn_of(i)]) << "element " << i;
  }
}

}  // namespace
}  // namespace stepgraph::test
