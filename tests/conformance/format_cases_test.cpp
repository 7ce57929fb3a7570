#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// Cases about storage formats, from the field and from what the formats promise.
namespace stepgraph::test {
namespace {

using enum storage_format;

class FormatCases : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(FormatCases, one_executor);

TEST_P(FormatCases, A08_F32OnesWithBf16GradientOfOnes) {
  const auto adapter =
      make(uniform_problem({.name = "group"}, 1.0f, 1.0f, {f32, bf16, none, f32, f32}, 16));
  adapter->launch();
  for (const float value : adapter->values(0, parameter_operand)) EXPECT_NEAR(value, 0.999, 1e-7);
}

/// Half a unit in the last place of a moment's format at a value of the block's largest size.
double half_place(storage_format format, double value) {
  const int mantissa_bits = format == f16 ? 10 : format == bf16 ? 7 : format == e4m3 ? 3 : 23;
  return std::ldexp(0.5, std::ilogb(value) - mantissa_bits) * (1.0 + 1e-6);
}

// From fresh moments the first update is exactly the learning rate; moments rounded before they are
// used would show: 0.1 is 0.10009766 in bf16 and 0.1015625 in e4m3.
TEST_P(FormatCases, A09_UpdateUsesTheMomentsBeforeTheyAreRounded) {
  for (const storage_format master : {none, f32, remainder}) {
    for (const storage_format moments : {f32, bf16, f16, e4m3}) {
      for (const storage_format maximum : {none, moments}) {
        const update_signature signature = {
            master == none ? f32 : bf16, bf16, master, moments, moments, maximum};
        SCOPED_TRACE(name_of(signature));
        const auto adapter = make(
            uniform_problem({.name = "group", .learning_rate = 0.1}, 1.0f, 1.0f, signature, 300));
        adapter->launch();
        const std::vector<float> weight = adapter->values(0, carrier_of(signature));
        const std::vector<float> exp_avg = adapter->values(0, exp_avg_operand);
        const std::vector<float> exp_avg_sq = adapter->values(0, exp_avg_sq_operand);
        for (const std::size_t i : {0u, 127u, 128u, 299u}) {
          EXPECT_NEAR(weight[i], 0.9, 2e-7);
          EXPECT_NEAR(exp_avg[i], 0.1, half_place(moments, 0.1));
          if (is_block_scaled(moments)) {
            const double root = std::sqrt(1e-3);
            EXPECT_NEAR(std::sqrt(exp_avg_sq[i]), root, half_place(moments, root));
          } else {
            EXPECT_NEAR(exp_avg_sq[i], 1e-3, half_place(moments, 1e-3));
          }
        }
        run_and_check_against_float64(*adapter, 3);
      }
    }
  }
}

TEST_P(FormatCases, A10_ReplayQuantizesWithTheScaleOfItsTime) {
  for (const storage_format parameter : {e4m3, e5m2}) {
    for (const storage_format master : {none, f32, f16}) {
      const update_signature signature = {parameter, bf16, master, f32, f32};
      SCOPED_TRACE(name_of(signature));
      test_problem problem;
      problem.groups = {{.name = "group", .learning_rate = 0.05, .weight_decay = 0.1}};
      problem.add({"weight", 0, 5000, signature});
      problem.add({"neighbour", 0, 3000, signature});
      const auto adapter = make(problem);
      run_and_check_against_float64(*adapter, 1);
      const auto scaling = [&](std::size_t tensor) {
        operand_set operands;
        operands[parameter_scaling_operand] = adapter->read(tensor, parameter_scaling_operand);
        return scaling_of(operands);
      };
      const float neighbour_inverse = scaling(1).scale_inv;
      for (const float scale : {20.0f, 90.0f, 1.0f}) {
        // What a delayed-scaling recipe does between steps.
        const float inverse_before = scaling(0).scale_inv;
        adapter->write(0, parameter_scaling_operand,
                       bytes_of(std::vector<scaling_values>{{scale, 0.0f, inverse_before}}));
        run_and_check_against_float64(*adapter, 1);
        EXPECT_EQ(scaling(0).scale, scale);
        EXPECT_EQ(scaling(0).scale_inv, 1.0f / scale);
        EXPECT_EQ(scaling(1).scale_inv, neighbour_inverse);
        if (master == f32) {
          const std::vector<float> weight = adapter->values(0, master_operand);
          const std::vector<float> dequantized = adapter->values(0, parameter_operand);
          float amax = 0.0f;
          for (std::size_t i = 0; i < weight.size(); ++i) {
            amax = std::max(amax, std::abs(weight[i]));
            const double error = std::max(0x1p-4 * std::abs(weight[i]), 0x1p-10 / scale);
            ASSERT_NEAR(dequantized[i], weight[i], parameter == e4m3 ? error : 2.0 * error);
          }
          EXPECT_EQ(scaling(0).amax, amax);
        }
      }
    }
  }
}

TEST_P(FormatCases, AmaxOnlyRises) {
  test_problem problem = uniform_problem({.name = "group"}, 1.0f, 1.0f, {e4m3, f32, f32, f32, f32});
  problem.contents[0][parameter_scaling_operand] =
      bytes_of(std::vector<scaling_values>{{8.0f, 100.0f, 0.25f}});
  const auto adapter = make(problem);
  adapter->launch();
  operand_set operands;
  operands[parameter_scaling_operand] = adapter->read(0, parameter_scaling_operand);
  EXPECT_EQ(scaling_of(operands).amax, 100.0f);
  EXPECT_EQ(scaling_of(operands).scale_inv, 0.125f);
}

TEST_P(FormatCases, ParameterPastTheFp8RangeSaturates) {
  for (const auto& [format, largest] : {std::pair{e4m3, 448.0f}, std::pair{e5m2, 57344.0f}}) {
    const auto adapter = make(uniform_problem({.name = "group", .learning_rate = 1.0}, -1e6f, 1.0f,
                                              {format, f32, f32, f32, f32}, 5));
    adapter->launch();
    EXPECT_EQ(adapter->values(0, parameter_operand), std::vector<float>(5, -largest));
  }
}

TEST_P(FormatCases, A29_LargestSecondMomentStaysInTheDenominator) {
  for (const auto& [moments, tolerance] :
       {std::pair{f32, 1e-6}, std::pair{f16, 1e-3}, std::pair{bf16, 1e-2}}) {
    SCOPED_TRACE(name_of(moments));
    const auto adapter =
        make(uniform_problem({.name = "group", .learning_rate = 0.1, .beta2 = 0.9}, 1.0f, 10.0f,
                             {f32, f32, none, f32, moments, moments}));
    adapter->launch();
    const float small = 0.1f;
    adapter->write(0, gradient_operand, encode(f32, std::span(&small, 1)));
    adapter->launch(9);
    EXPECT_NEAR(adapter->first_value(), 0.594738, tolerance);
    EXPECT_NEAR(adapter->first_value(max_exp_avg_sq_operand), 10.0, 10.0 * tolerance);
    EXPECT_LT(adapter->first_value(exp_avg_sq_operand), 5.0);
  }
}

/// Two bf16 tensors of ones whose true update is 2^-12, a sixteenth of their last place.
test_problem small_updates(std::uint64_t seed, bool stochastic) {
  test_problem problem;
  problem.groups = {{.name = "group", .learning_rate = 0x1p-12}};
  problem.options = {.stochastic_rounding = stochastic, .seed = seed};
  problem.add_uniform("first", 0, 10000, {bf16, bf16, none, f32, f32}, 1.0f, 1.0f);
  problem.add_uniform("second", 0, 10000, {bf16, bf16, none, f32, f32}, 1.0f, 1.0f);
  return problem;
}

TEST_P(FormatCases, A30_StochasticRoundingKeepsSmallUpdatesOnAverage) {
  const auto adapter = make(small_updates(11, true));
  adapter->launch(64);
  for (const std::size_t tensor : {0u, 1u}) {
    double sum = 0.0;
    for (const float value : adapter->values(tensor, parameter_operand)) sum += value;
    // A step goes down by 2^-8 with probability 1/16.
    const double sigma = std::sqrt(64 * (1.0 / 16) * (15.0 / 16) / 10000) * 0x1p-8;
    EXPECT_NEAR(sum / 10000, 1.0 - 64 * 0x1p-12, 4.0 * sigma);
  }
  const auto nearest = make(small_updates(11, false));
  nearest->launch(64);
  EXPECT_EQ(nearest->values(0, parameter_operand), std::vector<float>(10000, 1.0f));
}

TEST_P(FormatCases, A30_NoiseDiffersByReplayTensorAndSeedAndRepeats) {
  const auto first_step_of = [this](std::uint64_t seed, std::uint64_t step, std::size_t tensor) {
    const auto adapter = make(small_updates(seed, true));
    adapter->get().set_step(step);
    adapter->launch();
    return adapter->values(tensor, parameter_operand);
  };
  const std::vector<float> once = first_step_of(3, 0, 0);
  EXPECT_EQ(first_step_of(3, 0, 0), once);
  EXPECT_NE(first_step_of(3, 1, 0), once);
  EXPECT_NE(first_step_of(3, 0, 1), once);
  EXPECT_NE(first_step_of(4, 0, 0), once);

  // A replay goes on where the count of steps is.
  const auto replayed = make(small_updates(3, true));
  replayed->launch();
  replayed->write(0, parameter_operand, replayed->problem().contents[0][parameter_operand]);
  replayed->launch();
  EXPECT_EQ(replayed->values(0, parameter_operand), first_step_of(3, 1, 0));
}

TEST_P(FormatCases, StochasticRoundingHasTheBitsOfTheHostAtEverySizeAndOffset) {
  test_problem problem;
  problem.options = {.stochastic_rounding = true, .seed = 0x123456789abcdefu};
  const update_signature tuned = {bf16, bf16, none, f32, f32};
  const update_signature generic = {bf16, f16, none, e4m3, f32};
  for (const update_signature& signature : {tuned, generic}) {
    for (const std::uint64_t numel : boundary_sizes) {
      for (const std::uint64_t offset : {0u, 1u}) {
        problem.add({name_of(signature) + " " + std::to_string(problem.tensors.size()), 0, numel,
                     signature, all_offset_by(offset)});
      }
    }
  }
  const auto found = make(problem);
  const auto expected = make_adapter(executor_kind::host, problem);
  found->run_with_fresh_gradients(3);
  expected->run_with_fresh_gradients(3);
  expect_same_bits(problem, found->read_all(), expected->read_all());
}

// A parameter with a master is a copy: its rounding must not be random.
TEST_P(FormatCases, StochasticRoundingLeavesCopiesOfAMasterAlone) {
  test_problem problem = single_tensor_problem({bf16, bf16, f32, f32, f32}, 3000);
  problem.options = {.stochastic_rounding = true, .seed = 5};
  const auto adapter = make(problem);
  adapter->launch();
  EXPECT_EQ(adapter->read(0, parameter_operand), encode(bf16, adapter->values(0, master_operand)));
}

/// What each element of an adversarial tensor is to its block.
enum class part { giant, ordinary, silent };

part part_of(std::size_t i) {
  return i % 64 == 5 ? part::giant : i % 3 == 0 ? part::silent : part::ordinary;
}

/// Gradients of very different size beside each other; the silent ones are always zero.
operand_bytes adversarial_gradient(std::size_t numel, double ratio, integer_generator& random) {
  std::vector<float> gradient(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    const auto ordinary = random.signed_value(-12, -10);
    gradient[i] = part_of(i) == part::silent  ? 0.0f
                  : part_of(i) == part::giant ? ordinary * static_cast<float>(ratio)
                                              : ordinary;
  }
  return encode(f32, gradient);
}

struct adversarial_case {
  const char* name;
  storage_format exp_avg;
  storage_format exp_avg_sq;
  bool amsgrad;
};

std::string test_name(const adversarial_case& tested) { return tested.name; }

const adversarial_case adversarial_cases[] = {
    {"f16", f16, f16, false},
    {"e4m3", e4m3, e4m3, false},
    {"e4m3_after_f32", f32, e4m3, false},
    {"f16_after_f32", f32, f16, false},
    {"e4m3_amsgrad", e4m3, e4m3, true},
    {"f16_amsgrad", f32, f16, true},
};

auto every_adversarial_case(executor_kind kind) {
  return ::testing::Combine(::testing::Values(kind), ::testing::ValuesIn(adversarial_cases));
}

class AdversarialBlocks : public ConformanceWith<adversarial_case> {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(AdversarialBlocks, every_adversarial_case);

TEST_P(AdversarialBlocks, NeitherMoveSilentCoordinatesNorExplode) {
  constexpr std::size_t numel = 2048 + 200;
  const double learning_rate = 1e-3;
  for (const double ratio : {1e6, 1e9, 1e13, 1e-3}) {
    SCOPED_TRACE(ratio);
    const update_signature signature = {f32,
                                        f32,
                                        none,
                                        tested().exp_avg,
                                        tested().exp_avg_sq,
                                        tested().amsgrad ? tested().exp_avg_sq : none};
    test_problem problem;
    problem.groups = {{.name = "group", .learning_rate = learning_rate}};
    problem.add_uniform("tensor", 0, numel, signature, 1.0f, 0.0f);
    const auto adapter = make(problem);
    integer_generator random(17);
    std::vector<float> before = adapter->values(0, parameter_operand);
    for (int step = 0; step < 50; ++step) {
      // A few steps without giants: their moments fade slowly, their neighbours' must survive.
      adapter->write(0, gradient_operand,
                     adversarial_gradient(numel, step % 10 == 9 ? 1.0 : ratio, random));
      adapter->launch();
      const std::vector<float> after = adapter->values(0, parameter_operand);
      for (std::size_t i = 0; i < numel; ++i) {
        ASSERT_LE(std::abs(static_cast<double>(after[i]) - before[i]), 10.0 * learning_rate)
            << "element " << i << " at step " << step;
      }
      before = after;
    }
    const std::vector<float> exp_avg = adapter->values(0, exp_avg_operand);
    const std::vector<float> exp_avg_sq = adapter->values(0, exp_avg_sq_operand);
    for (std::size_t i = 0; i < numel; ++i) {
      if (part_of(i) == part::silent) {
        ASSERT_EQ(before[i], 1.0f) << i;
        ASSERT_EQ(exp_avg[i], 0.0f) << i;
        ASSERT_EQ(exp_avg_sq[i], 0.0f) << i;
      } else {
        ASSERT_GT(exp_avg_sq[i], 0.0f) << i;
      }
    }
  }
}

}  // namespace
}  // namespace stepgraph::test
