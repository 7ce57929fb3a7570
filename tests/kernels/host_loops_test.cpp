#include "stepgraph/kernels/host_loops.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../../kernels/src/host/chunk_loops.hpp"
#include "kernels/kernel_problem.hpp"

namespace stepgraph {
namespace {

using test::host_block;
using test::host_tensors;
using test::kernel_tensor;
using test::operand_bytes;
using test::operand_set;

struct instruction_set {
  const char* name;
  host::chunk_loops loops;
};

/// The compiled versions that this processor can run, baseline first.
std::vector<instruction_set> instruction_sets() {
  std::vector<instruction_set> sets = {{"baseline", host::chunk_loops_baseline()}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    sets.push_back({"avx2", host::chunk_loops_avx2()});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    sets.push_back({"avx512", host::chunk_loops_avx512()});
  }
#endif
  return sets;
}

math::adam_terms ordinary_terms() {
  host_block block(1);
  block.groups[0].weight_decay = 0.1;
  test::advance_unmeasured(block);
  return block.terms[0];
}

/// Replaces the first gradients by values that take the rare paths, none of which makes a NaN.
void plant_extreme_gradients(const update_signature& signature, operand_set& operands) {
  const float extremes[] = {0.0f,   -0.0f,   1e-45f,
                            1e-38f, -3e-6f,  65504.0f,
                            -1e20f, 3.4e38f, std::numeric_limits<float>::infinity()};
  operand_bytes bytes = test::encode(signature.gradient, extremes);
  operand_bytes& gradient = operands[test::gradient_operand];
  std::memcpy(gradient.data(), bytes.data(), std::min(bytes.size(), gradient.size()));
}

/// One element at a time: the definition that the loops must reproduce bit for bit.
void update_by_element(const update_signature& signature, const math::adam_terms& terms,
                       operand_set& operands) {
  const auto values = [&](std::size_t operand) {
    return test::values_of(signature, operands, operand);
  };
  test::tensor_values after = {values(test::carrier_of(signature)), values(test::gradient_operand),
                               values(test::exp_avg_operand), values(test::exp_avg_sq_operand),
                               values(test::max_exp_avg_sq_operand)};
  const bool with_maximum = signature.max_exp_avg_sq != storage_format::none;
  test::scaling_values scaling = test::scaling_of(operands);
  for (std::size_t i = 0; i < after.weight.size(); ++i) {
    float maximum = with_maximum ? after.max_exp_avg_sq[i] : 0.0f;
    math::adam_update(terms, with_maximum, after.gradient[i], after.weight[i], after.exp_avg[i],
                      after.exp_avg_sq[i], maximum);
    if (with_maximum) after.max_exp_avg_sq[i] = maximum;
    scaling.amax = std::max(scaling.amax, std::abs(after.weight[i]));
  }
  test::encode_weight(signature, after.weight, scaling.scale, operands);
  test::encode_moments(signature, after, operands);
  if (is_fp8(signature.parameter) && !after.weight.empty()) {
    scaling.scale_inv = 1.0f / scaling.scale;
    operands[test::parameter_scaling_operand] = test::bytes_of(std::vector{scaling});
  }
}

class HostLoops : public ::testing::TestWithParam<update_signature> {};

INSTANTIATE_TEST_SUITE_P(TunedSignatures, HostLoops, ::testing::ValuesIn(test::tuned_signatures()),
                         [](const auto& tested) { return test::test_name(tested.param); });

/// Every instruction set over one tensor, against the definition.
void expect_updates_by_definition(const update_signature& signature, std::uint64_t numel,
                                  std::uint64_t offset) {
  const math::adam_terms terms = ordinary_terms();
  const std::vector<kernel_tensor> tensors = {{signature, numel, 0, offset}};
  std::vector<operand_set> contents = test::random_contents(tensors, numel);
  plant_extreme_gradients(signature, contents[0]);
  operand_set updated = contents[0];
  update_by_element(signature, terms, updated);
  const test::scaling_values scaling_before = test::scaling_of(contents[0]);
  const test::scaling_values scaling_after = test::scaling_of(updated);
  // The loops of a chunk leave the scaling to their caller.
  updated[test::parameter_scaling_operand] = contents[0][test::parameter_scaling_operand];
  const host_tensors expected(tensors, {updated});
  for (const instruction_set& set : instruction_sets()) {
    const host_tensors placed(tensors, contents);
    const std::uint32_t largest =
        set.loops.update(placed.descriptors[0], 0, numel, terms, math::rounding_source{});
    ASSERT_EQ(placed.buffers, expected.buffers)
        << set.name << " " << name_of(signature) << " x " << numel << " off by " << offset;
    if (is_fp8(signature.parameter)) {
      ASSERT_EQ(std::max(scaling_before.amax, math::bits_to_float(largest)), scaling_after.amax)
          << set.name << " " << name_of(signature) << " x " << numel;
    }
  }
}

TEST_P(HostLoops, EveryInstructionSetUpdatesByTheElementDefinition) {
  for (const std::uint64_t numel : {1u, 7u, 15u, 17u, 33u, 127u, 129u, 511u, 512u, 513u, 2048u}) {
    for (const std::uint64_t offset : {0u, 1u, 3u}) {
      expect_updates_by_definition(GetParam(), numel, offset);
    }
  }
}

TEST(HostLoopsOfEverySignature, EveryInstructionSetUpdatesByTheElementDefinition) {
  for (const update_signature& signature : test::supported_signatures()) {
    for (const std::uint64_t numel : {1u, 129u, 700u}) {
      expect_updates_by_definition(signature, numel, numel % 2);
    }
  }
}

// Random bits must not depend on how the processor vectorizes.
TEST(HostLoopsOfEverySignature, EveryInstructionSetRoundsStochasticallyAlike) {
  using enum storage_format;
  const math::adam_terms terms = ordinary_terms();
  const math::rounding_source rounding = {true, 0x123456789abcdefu, 77, 5};
  for (const storage_format gradient : {f32, bf16}) {
    const update_signature signature = {bf16, gradient, none, f32, e4m3};
    const std::vector<kernel_tensor> tensors = {{signature, 1999, 0, 1}};
    const std::vector<operand_set> contents = test::random_contents(tensors, 3);
    const host_tensors expected(tensors, contents);
    host::chunk_loops_baseline().update(expected.descriptors[0], 0, 1999, terms, rounding);
    for (const instruction_set& set : instruction_sets()) {
      const host_tensors placed(tensors, contents);
      set.loops.update(placed.descriptors[0], 0, 1999, terms, rounding);
      EXPECT_EQ(placed.buffers, expected.buffers) << set.name;
    }
  }
}

TEST_P(HostLoops, EveryInstructionSetAddsGradientsInTheSameOrder) {
  for (const std::uint64_t numel : {1u, 3u, 255u, 1000u, 2047u, 2048u}) {
    const std::vector<kernel_tensor> tensors = {{GetParam(), numel, 0, numel % 2}};
    const host_tensors placed(tensors, test::random_contents(tensors, numel));
    for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
      for (const bool count_zeros : {false, true}) {
        const statistics_options options = {norm, count_zeros};
        host::thread_statistics expected;
        host::chunk_loops_baseline().add_gradients(placed.descriptors[0], 0, numel, options,
                                                   expected);
        for (const instruction_set& set : instruction_sets()) {
          host::thread_statistics found;
          set.loops.add_gradients(placed.descriptors[0], 0, numel, options, found);
          EXPECT_EQ(std::memcmp(&found, &expected, sizeof(found)), 0) << set.name << " " << numel;
        }
      }
    }
  }
}

TEST_P(HostLoops, UpdateCoversTheTensorsOfEveryGroup) {
  const std::vector<kernel_tensor> tensors = {
      {GetParam(), 5, 0, 0},    {GetParam(), 0, 1, 0},    {GetParam(), 4097, 1, 1},
      {GetParam(), 2048, 2, 0}, {GetParam(), 2049, 0, 3},
  };
  std::vector<operand_set> contents = test::random_contents(tensors, 21);
  const host_tensors placed(tensors, contents);
  host_block block(3);
  test::advance_unmeasured(block);
  host::update(placed.host_table(), block.view(), {});
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    update_by_element(GetParam(), block.terms[tensors[t].group], contents[t]);
  }
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
}

TEST_P(HostLoops, UpdateZeroesGradientsWhenAsked) {
  const std::vector<kernel_tensor> tensors = {{GetParam(), 3000, 0, 1}};
  std::vector<operand_set> contents = test::random_contents(tensors, 22);
  const host_tensors placed(tensors, contents);
  host_block block(1);
  test::advance_unmeasured(block);
  host::update(placed.host_table(), block.view(), {.gradients = gradient_store::zero});
  update_by_element(GetParam(), block.terms[0], contents[0]);
  for (std::byte& byte : contents[0][test::gradient_operand]) byte = std::byte{0};
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
}

TEST_P(HostLoops, SkippedUpdateTouchesNothingButGradientsToZero) {
  const std::vector<kernel_tensor> tensors = {{GetParam(), 3000, 0, 0}};
  std::vector<operand_set> contents = test::random_contents(tensors, 23);
  const host_tensors placed(tensors, contents);
  const host_tensors untouched(tensors, contents);
  host_block block(1);
  test::advance_by_total(block, std::numeric_limits<double>::infinity());
  host::update(placed.host_table(), block.view(), {});
  EXPECT_EQ(placed.buffers, untouched.buffers);
  host::update(placed.host_table(), block.view(), {.gradients = gradient_store::zero});
  for (std::byte& byte : contents[0][test::gradient_operand]) byte = std::byte{0};
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
}

// What is left is what scale_gradients leaves, and the update reads what was there before.
TEST_P(HostLoops, UpdateLeavesUnscaledGradientsWhenAsked) {
  const std::vector<kernel_tensor> tensors = {{GetParam(), 3000, 0, 1}};
  std::vector<operand_set> contents = test::random_contents(tensors, 24);
  const host_tensors placed(tensors, contents);
  host_block block(1);
  block.groups[0].flags |= group_maximize;
  block.scalars.next_loss_scale.scale = 3.0f;
  test::advance_unmeasured(block);
  host::update(placed.host_table(), block.view(), {.gradients = gradient_store::unscaled});
  update_by_element(GetParam(), block.terms[0], contents[0]);
  const storage_format format = GetParam().gradient;
  std::vector<float> values = test::decode(format, contents[0][test::gradient_operand]);
  // Maximizing turns the direction of the update, not the gradient.
  for (float& value : values) value *= static_cast<float>(1.0 / 3.0);
  contents[0][test::gradient_operand] = test::encode(format, values);
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
}

TEST_P(HostLoops, SkippedUpdateLeavesGradientsThatItShouldUnscale) {
  const std::vector<kernel_tensor> tensors = {{GetParam(), 3000, 0, 0}};
  const std::vector<operand_set> contents = test::random_contents(tensors, 25);
  const host_tensors placed(tensors, contents);
  host_block block(1);
  block.scalars.next_loss_scale.scale = 4.0f;
  test::advance_by_total(block, std::numeric_limits<double>::infinity());
  host::update(placed.host_table(), block.view(), {.gradients = gradient_store::unscaled});
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
}

}  // namespace
}  // namespace stepgraph
