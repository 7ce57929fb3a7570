#include "stepgraph/kernels/host_loops.hpp"

#include <gtest/gtest.h>
#include <omp.h>

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
  host::advance_step(block.view(), {}, {});
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

TEST_P(HostLoops, EveryInstructionSetAddsSquaresInTheSameOrder) {
  for (const std::uint64_t numel : {1u, 3u, 255u, 1000u, 2047u, 2048u}) {
    const std::vector<kernel_tensor> tensors = {{GetParam(), numel, 0, numel % 2}};
    const host_tensors placed(tensors, test::random_contents(tensors, numel));
    host::thread_sums expected;
    EXPECT_EQ(host::chunk_loops_baseline().add_squares(placed.descriptors[0], 0, numel, expected),
              0u);
    for (const instruction_set& set : instruction_sets()) {
      host::thread_sums sums;
      EXPECT_EQ(set.loops.add_squares(placed.descriptors[0], 0, numel, sums), 0u);
      EXPECT_EQ(std::memcmp(&sums, &expected, sizeof(sums)), 0) << set.name << " " << numel;
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
  host::advance_step(block.view(), {}, {});
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
  host::advance_step(block.view(), {}, {});
  host::update(placed.host_table(), block.view(), {.zero_gradients = true});
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
  host::advance_step(block.view(), {}, {0.0, 1, 1});
  host::update(placed.host_table(), block.view(), {});
  EXPECT_EQ(placed.buffers, untouched.buffers);
  host::update(placed.host_table(), block.view(), {.zero_gradients = true});
  for (std::byte& byte : contents[0][test::gradient_operand]) byte = std::byte{0};
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
}

/// Tensors of every gradient format and of lengths around the chunk.
std::vector<kernel_tensor> tensors_of_every_gradient_format() {
  std::vector<kernel_tensor> tensors;
  for (const storage_format gradient :
       {storage_format::f32, storage_format::f16, storage_format::bf16}) {
    for (const std::uint64_t numel : {1u, 0u, 2047u, 2048u, 2049u, 30001u}) {
      update_signature signature;
      signature.gradient = gradient;
      tensors.push_back({signature, numel, 0, numel % 3});
    }
  }
  return tensors;
}

TEST(GradStats, SumDoesNotDependOnTheNumberOfThreads) {
  const std::vector<kernel_tensor> tensors = tensors_of_every_gradient_format();
  const host_tensors placed(tensors, test::random_contents(tensors, 31));
  const int threads_before = omp_get_max_threads();
  omp_set_num_threads(1);
  const double expected = host::grad_stats(placed.host_table()).sum_of_squares;
  for (const int threads : {2, 3, 7, 16}) {
    omp_set_num_threads(threads);
    EXPECT_EQ(host::grad_stats(placed.host_table()).sum_of_squares, expected) << threads;
  }
  omp_set_num_threads(threads_before);
}

TEST(GradStats, SumIsThatOfFloat64) {
  const std::vector<kernel_tensor> tensors = tensors_of_every_gradient_format();
  const std::vector<operand_set> contents = test::random_contents(tensors, 32);
  const host_tensors placed(tensors, contents);
  long double expected = 0.0L;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    for (const float value :
         test::decode(tensors[t].signature.gradient, contents[t][test::gradient_operand])) {
      expected += static_cast<long double>(value) * value;
    }
  }
  const gradient_statistics statistics = host::grad_stats(placed.host_table());
  EXPECT_NEAR(statistics.sum_of_squares / static_cast<double>(expected), 1.0, 1e-6);
  EXPECT_EQ(statistics.non_finite, 0u);
  EXPECT_EQ(statistics.measured, 1u);
}

TEST(GradStats, OfNoTensorsIsZero) {
  const gradient_statistics statistics = host::grad_stats({});
  EXPECT_EQ(statistics.sum_of_squares, 0.0);
  EXPECT_EQ(statistics.non_finite, 0u);
  EXPECT_EQ(statistics.measured, 1u);
}

TEST(GradStats, FindsOneNonFiniteElementAnywhere) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const storage_format gradient :
       {storage_format::f32, storage_format::f16, storage_format::bf16}) {
    update_signature signature;
    signature.gradient = gradient;
    const std::vector<kernel_tensor> tensors = {{signature, 10, 0, 0}, {signature, 4100, 0, 1}};
    for (const float value : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
      for (const std::uint64_t position : {0u, 1u, 2047u, 2048u, 4095u, 4099u}) {
        std::vector<operand_set> contents = test::random_contents(tensors, 33);
        const operand_bytes bad = test::encode(gradient, std::span(&value, 1));
        std::memcpy(contents[1][test::gradient_operand].data() + position * bad.size(), bad.data(),
                    bad.size());
        const host_tensors placed(tensors, contents);
        EXPECT_NE(host::grad_stats(placed.host_table()).non_finite, 0u)
            << name_of(gradient) << " " << value << " at " << position;
      }
    }
  }
}

TEST(AdvanceStep, AppliesABatchOnce) {
  host_block block(2);
  const setting entries[] = {{1, setting_field::learning_rate, 0.5},
                             {whole_step, setting_field::loss_scale, 2.0}};
  host::advance_step(block.view(), {entries, 2, 7}, {});
  EXPECT_EQ(block.groups[1].learning_rate, 0.5);
  EXPECT_EQ(block.groups[0].learning_rate, 1e-3);
  EXPECT_EQ(block.scalars.loss_scale, 2.0f);
  EXPECT_EQ(block.scalars.settings_serial, 7u);
  // A captured launch repeats its arguments; a value that came another way must survive.
  block.groups[1].learning_rate = 0.25;
  host::advance_step(block.view(), {entries, 2, 7}, {});
  EXPECT_EQ(block.groups[1].learning_rate, 0.25);
  EXPECT_EQ(block.progress[1].step, 2u);
}

TEST(AdvanceStep, SkippedStepAppliesSettingsButAdvancesNoGroup) {
  host_block block(1);
  const setting entries[] = {{0, setting_field::eps, 0.5}};
  host::advance_step(block.view(), {entries, 1, 1}, {0.0, 1, 1});
  EXPECT_EQ(block.groups[0].eps, 0.5);
  EXPECT_EQ(block.progress[0].step, 0u);
  EXPECT_EQ(block.scalars.step, 0u);
  EXPECT_EQ(block.scalars.skipped, 1u);
}

TEST(ApplySettings, ChangesSettingsWithoutAStep) {
  host_block block(1);
  const setting entries[] = {{0, setting_field::beta1, 0.5}, {0, setting_field::group_step, 9.0}};
  host::apply_settings(block.view(), {entries, 2, 3});
  EXPECT_EQ(block.groups[0].beta1, 0.5);
  EXPECT_EQ(block.progress[0].step, 9u);
  EXPECT_EQ(block.scalars.step, 0u);
}

}  // namespace
}  // namespace stepgraph
