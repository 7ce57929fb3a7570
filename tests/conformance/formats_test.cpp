#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "common/warmed_up.hpp"
#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// What must hold for every storage signature: signature by signature for those with a kernel of
// their own, all in one plan for the whole table (every_signature_test.cpp).
namespace stepgraph::test {
namespace {

const group_options ordinary_group = {
    .name = "ordinary", .learning_rate = 3e-3, .weight_decay = 0.1};

/// Every boundary size of one signature in one plan. Every second tensor starts with fresh moments,
/// where the second moment shows the accuracy of 1 - beta2.
test_problem boundary_problem(const update_signature& signature) {
  test_problem problem;
  problem.groups = {ordinary_group};
  for (const std::uint64_t numel : boundary_sizes) {
    problem.add({"size " + std::to_string(numel), 0, numel, signature});
    if (problem.tensors.size() % 2 == 0) {
      // The scales of moments that start at zero may be anything.
      for (const std::size_t operand : {exp_avg_operand, exp_avg_sq_operand}) {
        operand_bytes& bytes = problem.contents.back()[operand];
        std::fill(bytes.begin(), bytes.end(), std::byte{0});
      }
    }
  }
  return problem;
}

/// Each operand off its boundary by 1, 2 and 3 elements, alone and all together.
test_problem unaligned_problem(const update_signature& signature) {
  test_problem problem;
  problem.groups = {ordinary_group};
  const auto add = [&](std::string name, std::array<std::uint64_t, operand_count> offsets) {
    for (const std::uint64_t numel : {9u, 2049u, 4096u}) {
      problem.add({name + " of " + std::to_string(numel), 0, numel, signature, offsets});
    }
  };
  for (std::uint64_t offset = 1; offset <= 3; ++offset) {
    for (std::size_t operand = 0; operand < operand_count; ++operand) {
      if (problem.contents.empty() || !problem.contents.back()[operand].empty()) {
        std::array<std::uint64_t, operand_count> offsets = {};
        offsets[operand] = offset;
        add(std::string(operand_names[operand]) + " off by " + std::to_string(offset), offsets);
      }
    }
    add("all off by " + std::to_string(offset), all_offset_by(offset));
  }
  add("each off differently", {1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2});
  return problem;
}

class Formats : public ConformanceWith<update_signature> {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Formats, every_tuned_signature);

TEST_P(Formats, StepsOfEverySizeMatchFloat64) {
  run_and_check_against_float64(*make(boundary_problem(tested())), 3);
}

TEST_P(Formats, A15_UnalignedOperandsMatchFloat64) {
  run_and_check_against_float64(*make(unaligned_problem(tested())), 1);
}

TEST_P(Formats, ZeroGradientsLeavesZerosBehind) {
  test_problem problem = boundary_problem(tested());
  problem.options.zero_gradients = true;
  run_and_check_against_float64(*make(problem), 2);
}

TEST_P(Formats, A08_OnesWithGradientOfOnesMoveByTheLearningRate) {
  const auto adapter = make(uniform_problem({.name = "group"}, 1.0f, 1.0f, tested(), 16));
  adapter->launch();
  const storage_format carrier = formats_of(tested())[carrier_of(tested())];
  if (carrier == storage_format::f32 || carrier == storage_format::remainder) {
    for (const float value : adapter->values(0, carrier_of(tested()))) {
      EXPECT_NEAR(value, 0.999, 1e-7);
    }
  }
  // A remainder's parameter rounds ties away from zero, but .999 is no tie.
  for (const float value : adapter->values(0, parameter_operand)) {
    EXPECT_EQ(value, rounded(tested().parameter, 0.999f));
  }
}

TEST_P(Formats, NonFiniteGradientLeavesEveryBitAndLaterStepsGoOn) {
  test_problem problem;
  problem.groups = {ordinary_group};
  problem.options.skip_non_finite = true;
  problem.add({"first", 0, 3000, tested()});
  problem.add({"second", 0, 2049, tested(), all_offset_by(1)});
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
    const auto adapter = make(problem);
    run_and_check_against_float64(*adapter, 1);
    for (const std::size_t position : {0u, 2047u, 2048u}) {
      operand_bytes gradient = problem.gradient_at(1, 5);
      const operand_bytes bad = encode(tested().gradient, std::span(&value, 1));
      std::memcpy(gradient.data() + position * bad.size(), bad.data(), bad.size());
      adapter->write(1, gradient_operand, gradient);
      const std::vector<operand_set> before = adapter->read_all();
      adapter->launch();
      expect_same_bits(problem, adapter->read_all(), before);
      const step_status status = adapter->get().status();
      EXPECT_TRUE(status.last_skipped);
      EXPECT_EQ(status.step, 1u);
      EXPECT_EQ(status.groups[0].step, 1u);
      EXPECT_EQ(status.grad_norm, infinity);
    }
    EXPECT_EQ(adapter->get().status().skipped, 3u);
    run_and_check_against_float64(*adapter, 1);
    EXPECT_EQ(adapter->get().status().step, 2u);
  }
}

TEST_P(Formats, A20_SkippedStepDoesNotCount) {
  const group_options group = {.name = "group", .learning_rate = 0.1};
  test_problem problem = uniform_problem(group, 1.0f, 1.0f, tested());
  problem.options.skip_non_finite = true;
  const auto adapter = make(problem);
  adapter->launch();
  const float infinity = std::numeric_limits<float>::infinity();
  adapter->write(0, gradient_operand, encode(tested().gradient, std::span(&infinity, 1)));
  adapter->launch();
  adapter->write(0, gradient_operand, problem.contents[0][gradient_operand]);
  adapter->launch();
  // Without a master the parameter is rounded once a step; moments in 16 bits or fewer have their
  // own last places, but fresh ones of equal gradients keep the update close to one.
  EXPECT_NEAR(adapter->values(0, carrier_of(tested())).at(0), 0.8,
              formats_of(tested())[carrier_of(tested())] == storage_format::bf16 ||
                      tested().exp_avg != storage_format::f32
                  ? 0x1p-7
                  : 1e-6);
  EXPECT_EQ(adapter->get().status().groups[0].step, 2u);
  EXPECT_EQ(adapter->get().status().skipped, 1u);
}

TEST_P(Formats, LossScaleIsDividedOutExactly) {
  test_problem plain;
  plain.groups = {ordinary_group};
  plain.add({"tensor", 0, 5000, tested()});
  test_problem scaled = plain;
  scaled.options.loss_scale = 256.0;
  const auto unscaled_run = make(plain);
  const auto scaled_run = make(scaled);
  // A power of two changes exponents alone, so the update has the same bits.
  unscaled_run->run_with_fresh_gradients(3);
  scaled_run->run_with_fresh_gradients(3);
  std::vector<operand_set> found = scaled_run->read_all();
  const std::vector<operand_set> expected = unscaled_run->read_all();
  found[0][gradient_operand] = expected[0][gradient_operand];
  expect_same_bits(plain, found, expected);
}

#if defined(STEPGRAPH_HAS_CUDA)
/// The host executor is the oracle: same numbers, same order, same bits.
class SameBitsAsHost : public ConformanceWith<update_signature> {};

STEPGRAPH_INSTANTIATE_FOR_GPU(SameBitsAsHost, every_tuned_signature);

TEST_P(SameBitsAsHost, OverManySizesGroupsAndOffsets) {
  test_problem problem = boundary_problem(tested());
  const test_problem unaligned = unaligned_problem(tested());
  problem.options = {
      .skip_non_finite = true, .max_grad_norm = 2.0, .loss_scale = 16.0, .zero_gradients = true};
  problem.groups.push_back(
      {.name = "l2", .learning_rate = 1e-2, .weight_decay = 0.01, .mode = weight_decay_mode::l2});
  problem.groups.push_back(
      {.name = "scheduled",
       .beta1 = 0.8,
       .beta2 = 0.99,
       .maximize = true,
       .learning_rate_schedule = warmed_up(learning_rate_style::cosine, 0.0, 1e-2, 1e-4, 2, 7)});
  problem.groups.push_back({.name = "uncorrected", .bias_correction = false, .step = 3});
  for (std::size_t t = 0; t < unaligned.tensors.size(); ++t) {
    problem.tensors.push_back(unaligned.tensors[t]);
    problem.contents.push_back(unaligned.contents[t]);
  }
  for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
    problem.tensors[t].group = static_cast<group_id>(t % problem.groups.size());
  }
  expect_bits_of_host(kind(), problem, 5);
}
#endif

}  // namespace
}  // namespace stepgraph::test
