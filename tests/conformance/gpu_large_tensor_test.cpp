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

using enum storage_format;

constexpr float weights[] = {1.0f, 2.0f, -0.5f, 4.0f};

/// The codes of four elements.
palette codes_of(std::size_t size, const operand_bytes& bytes) {
  palette codes = {};
  for (std::size_t i = 0; i < codes.size(); ++i) {
    std::memcpy(&codes[i], bytes.data() + i * size, size);
  }
  return codes;
}

/// Four elements with those weights and gradients of one: each element of the large tensor is one.
test_problem four_elements(const update_signature& signature) {
  test_problem problem = uniform_problem({.learning_rate = 0.1}, 0.0f, 1.0f, signature, 4);
  encode_weight(signature, weights, 1.0f, problem.contents[0]);
  return problem;
}

struct large_case {
  std::uint64_t numel;
  update_signature signature;
};

class GpuLarge : public gpu_test, public ::testing::WithParamInterface<large_case> {};

INSTANTIATE_TEST_SUITE_P(
    GpuLarge, GpuLarge,
    ::testing::Values(large_case{2'359'332'864, {f32, f32, none, f32, f32}},
                      large_case{(1ull << 32) + 1, {bf16, bf16, none, bf16, bf16}},
                      large_case{(1ull << 32) + 1, {bf16, bf16, remainder, e4m3, e4m3}}),
    [](const auto& tested) {
      return std::to_string(tested.param.numel) + "_" + test_name(tested.param.signature);
    });

TEST_P(GpuLarge, A14_EveryElementIsUpdatedOnceAStep) {
  const auto& [numel, signature] = GetParam();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes));
  std::size_t needed = std::size_t{1} << 30;
  for (const storage_format format : formats_of(signature)) needed += numel * element_size(format);
  if (free_bytes < needed) {
    GTEST_SKIP() << "needs " << (needed >> 30) << " GiB of device memory, found "
                 << (free_bytes >> 30);
  }
  int device = 0;
  check(cudaGetDevice(&device));
  const device_location here = {device_kind::cuda, device};

  test_problem problem = four_elements(signature);
  std::vector<device_buffer<std::byte>> memory;
  for (std::size_t operand = 0; operand < operand_count; ++operand) {
    const std::size_t size = stored_size(signature, operand);
    const bool scales = operand >= bindable_operands;
    const bool exists = !problem.contents[0][operand].empty();
    memory.emplace_back(!exists ? 0 : scales ? scale_count(numel) : numel * size);
    if (!exists) continue;
    if (scales) {
      check(cudaMemset(memory.back().data(), 1, memory.back().size()));
    } else {
      check(fill(memory.back().data(), size, numel, codes_of(size, problem.contents[0][operand])));
    }
  }
  const auto view = [&](std::size_t operand) {
    tensor_view placed = {memory[operand].data(), numel, formats_of(signature)[operand], here};
    if (operand >= master_operand) {
      placed.scales = reinterpret_cast<std::uint8_t*>(memory[scales_of(operand)].data());
    }
    return placed;
  };
  tensor_operands operands = {.name = "large",
                              .parameter = view(parameter_operand),
                              .gradient = view(gradient_operand),
                              .exp_avg = view(exp_avg_operand),
                              .exp_avg_sq = view(exp_avg_sq_operand)};
  if (signature.master != none) operands.master = view(master_operand);
  step_builder builder;
  builder.set_options({.skip_non_finite = true});
  builder.add_group({.learning_rate = 0.1});
  builder.add_tensor(0, operands);
  const cuda_stream stream;
  check(cudaDeviceSynchronize());
  graph_executor executor(builder.build(), stream.get());
  executor.launch(stream.get());
  executor.launch(stream.get());
  const step_status status = executor.status();
  EXPECT_EQ(status.step, 2u);
  EXPECT_NEAR(status.grad_norm / std::sqrt(static_cast<double>(numel)), 1.0, 1e-6);

  const auto host = make_adapter(executor_kind::host, problem);
  host->launch(2);
  const device_buffer<unsigned long long> unlike(std::vector<unsigned long long>{0});
  for (std::size_t operand = 0; operand < operand_count; ++operand) {
    if (memory[operand].size() == 0) continue;
    const std::size_t size = stored_size(signature, operand);
    const operand_bytes expected = host->read(0, operand);
    const bool scales = operand >= bindable_operands;
    palette colours = {};
    if (scales) {
      colours.fill(static_cast<std::uint32_t>(expected[0]));
    } else {
      colours = codes_of(size, expected);
    }
    check(count_unlike(memory[operand].data(), size, memory[operand].size() / size, colours,
                       unlike.data()));
    EXPECT_EQ(unlike.read()[0], 0u) << operand_names[operand];
    if (scales) continue;
    // The count is itself a kernel over a large tensor; look at some elements without it.
    constexpr std::uint64_t half = std::uint64_t{1} << 31;
    for (const std::uint64_t i : {std::uint64_t{0}, half - 1, half, half + 1, numel - 1}) {
      std::uint32_t code = 0;
      check(cudaMemcpy(&code, memory[operand].data() + i * size, size, cudaMemcpyDeviceToHost));
      EXPECT_EQ(code, colours[turn_of(i)]) << operand_names[operand] << "[" << i << "]";
    }
  }
}

}  // namespace
}  // namespace stepgraph::test
