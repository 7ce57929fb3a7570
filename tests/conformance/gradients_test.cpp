#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// What a step leaves in the gradients, and gradients that have no parameter.
namespace stepgraph::test {
namespace {

class Gradients : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Gradients, one_executor);

constexpr storage_format gradient_formats[] = {storage_format::f32, storage_format::f16,
                                               storage_format::bf16};

/// Every gradient format, with a parameter and alone, around every boundary, some unaligned.
test_problem gradients_of_every_format(const step_options& options) {
  test_problem problem;
  problem.options = options;
  problem.groups = {{.name = "plain", .learning_rate = 1e-2},
                    {.name = "maximized", .learning_rate = 1e-2, .maximize = true}};
  for (const storage_format format : gradient_formats) {
    for (const std::uint64_t numel : boundary_sizes) {
      const auto group = static_cast<group_id>(problem.tensors.size() % 2);
      const std::string name = std::string(name_of(format)) + " x " + std::to_string(numel);
      problem.add({name, group, numel, {storage_format::f32, format}, all_offset_by(numel % 3)});
      problem.add(
          {name + " alone", group, numel, gradient_alone(format), all_offset_by(numel % 2)});
    }
  }
  return problem;
}

TEST_P(Gradients, UnscaledOnesOfEveryFormatMatchFloat64) {
  run_and_check_against_float64(
      *make(gradients_of_every_format({.loss_scale = 1000.0, .unscale_gradients = true})), 2);
  run_and_check_against_float64(
      *make(gradients_of_every_format(
          {.max_grad_norm = 3.0, .loss_scale = 64.0, .unscale_gradients = true})),
      2);
}

TEST_P(Gradients, UnscaledOnesOfEveryFormatHaveTheBitsOfTheHost) {
  for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
    expect_bits_of_host(GetParam(),
                        gradients_of_every_format({.max_grad_norm = 0.3,
                                                   .norm = norm,
                                                   .count_zeros = true,
                                                   .loss_scale = 48.0,
                                                   .unscale_gradients = true}),
                        2);
  }
}

TEST_P(Gradients, ScaleOfOneLeavesThemAsTheyAre) {
  const auto adapter = make(gradients_of_every_format({.unscale_gradients = true}));
  const std::vector<operand_set> before = adapter->read_all();
  adapter->launch();
  const std::vector<operand_set> after = adapter->read_all();
  for (std::size_t t = 0; t < before.size(); ++t) {
    EXPECT_EQ(after[t][gradient_operand], before[t][gradient_operand]);
  }
}

/// Gradients (3, 0, 4) over two tensors without parameters.
test_problem gradients_alone(const step_options& options) {
  test_problem problem;
  problem.options = options;
  problem.add_uniform("first", 0, 2, gradient_alone(storage_format::f32), 0.0f, 0.0f);
  problem.add_uniform("second", 0, 1, gradient_alone(storage_format::f32), 0.0f, 4.0f);
  return problem;
}

TEST_P(Gradients, AloneHaveANormAndStayAsTheyAre) {
  const auto adapter = make(gradients_alone({.measure_norm = true, .count_zeros = true}));
  adapter->write_gradient(0, std::vector{3.0f, 0.0f});
  adapter->launch(3);
  EXPECT_EQ(adapter->get().status().grad_norm, 5.0);
  EXPECT_EQ(adapter->get().status().zeros, 1u);
  EXPECT_EQ(adapter->get().status().step, 3u);
  EXPECT_EQ(adapter->values(0, gradient_operand), (std::vector<float>{3.0f, 0.0f}));
}

// torch.nn.utils.clip_grad_norm_: coefficient = max_norm / (norm + 1e-6), at most one; in place.
TEST_P(Gradients, AloneAreClippedAsTorchDoes) {
  test_problem problem;
  problem.options = {.max_grad_norm = 1.5, .unscale_gradients = true};
  for (const storage_format format : gradient_formats) {
    problem.add({name_of(format), 0, 5000, gradient_alone(format)});
  }
  const auto adapter = make(problem);
  double squares = 0.0;
  for (const operand_set& operands : problem.contents) {
    const auto t = static_cast<std::size_t>(&operands - problem.contents.data());
    for (const float value : decode(gradient_formats[t], operands[gradient_operand])) {
      squares += static_cast<double>(value) * value;
    }
  }
  const double norm = std::sqrt(squares);
  const double coefficient = std::min(1.0, 1.5 / (norm + 1e-6));
  adapter->launch();
  EXPECT_NEAR(adapter->get().status().grad_norm, norm, 1e-12 * norm);
  double squares_after = 0.0;
  for (std::size_t t = 0; t < 3; ++t) {
    const std::vector<float> before =
        decode(gradient_formats[t], problem.contents[t][gradient_operand]);
    const std::vector<float> after = adapter->values(t, gradient_operand);
    for (std::size_t i = 0; i < after.size(); ++i) {
      ASSERT_EQ(after[i],
                rounded(gradient_formats[t], before[i] * static_cast<float>(coefficient)));
      squares_after += static_cast<double>(after[i]) * after[i];
    }
  }
  EXPECT_NEAR(std::sqrt(squares_after), 1.5, 1e-2);
  // Clipping again changes what rounding left above the maximum, and nothing else.
  adapter->launch();
  EXPECT_NEAR(adapter->get().status().clip_coefficient, 1.0, 1e-2);
}

TEST_P(Gradients, AloneBelowTheMaximumAreNotClipped) {
  const auto adapter = make(gradients_alone({.max_grad_norm = 100.0, .unscale_gradients = true}));
  adapter->write_gradient(0, std::vector{3.0f, -0.0f});
  const std::vector<operand_set> before = adapter->read_all();
  adapter->launch();
  expect_same_bits(adapter->problem(), adapter->read_all(), before);
}

TEST_P(Gradients, AloneCanBeRebound) {
  const auto adapter = make(gradients_alone({.max_grad_norm = 1.0, .unscale_gradients = true}));
  adapter->launch();
  EXPECT_EQ(adapter->get().status().grad_norm, 4.0);
  const std::vector<float> fresh = {6.0f, 8.0f};
  adapter->rebind(0, gradient_operand, encode(storage_format::f32, fresh), 1);
  adapter->write_gradient(1, std::vector{0.0f});
  adapter->launch();
  EXPECT_EQ(adapter->get().status().grad_norm, 10.0);
  EXPECT_NEAR(adapter->values(0, gradient_operand)[0], 0.6, 1e-6);
  EXPECT_NEAR(adapter->values(0, gradient_operand)[1], 0.8, 1e-6);
  adapter->expect_guards_intact();
}

TEST_P(Gradients, UpdateReadsThemBeforeTheyAreUnscaled) {
  // One step of a scale of 2^16 on f16 gradients that vanish when they are divided by it.
  test_problem problem = uniform_problem({.name = "group", .learning_rate = 0.1, .eps = 0.0}, 1.0f,
                                         0x1p-12f, {storage_format::f32, storage_format::f16});
  problem.options = {.loss_scale = 65536.0, .unscale_gradients = true};
  const auto adapter = make(problem);
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.9, 1e-6);
  EXPECT_EQ(adapter->first_value(gradient_operand), 0.0);
}

}  // namespace
}  // namespace stepgraph::test
