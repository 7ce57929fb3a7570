#include "conformance/float64_check.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "common/reference_adam.hpp"
#include "common/reference_schedule.hpp"

namespace stepgraph::test {
namespace {

/// The learning rate that the group should use in its update number `step`.
double expected_learning_rate(const group_options& group, std::uint64_t step) {
  return group.schedule ? reference_learning_rate(*group.schedule, step - 1) : group.learning_rate;
}

reference_options options_of(const group_options& group, std::uint64_t step, double factor) {
  reference_options options;
  options.learning_rate = expected_learning_rate(group, step);
  options.beta1 = group.beta1;
  options.beta2 = group.beta2;
  options.eps = group.eps;
  options.weight_decay = group.weight_decay;
  options.decoupled = group.mode == weight_decay_mode::decoupled;
  options.bias_correction = group.bias_correction;
  options.maximize = group.maximize;
  options.gradient_factor = factor;
  options.step = step;
  return options;
}

double norm_of_gradients(const test_problem& problem, const std::vector<operand_set>& state) {
  long double sum = 0.0L;
  for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
    for (const float value :
         decode(problem.tensors[t].signature.gradient, state[t][gradient_operand])) {
      sum += static_cast<long double>(value) * value;
    }
  }
  return static_cast<double>(std::sqrt(sum));
}

void check_norm_and_clip(const test_problem& problem, const step_options& options,
                         const std::vector<operand_set>& before, const step_status& status) {
  if (!options.skip_non_finite && options.max_grad_norm == 0.0) {
    EXPECT_EQ(status.grad_norm, 0.0);
    EXPECT_EQ(status.clip_coefficient, 1.0);
    return;
  }
  const double norm = norm_of_gradients(problem, before) / options.loss_scale;
  EXPECT_NEAR(status.grad_norm, norm, 1e-6 * norm);
  const double clip =
      options.max_grad_norm > 0.0 ? std::min(1.0, options.max_grad_norm / (norm + 1e-6)) : 1.0;
  EXPECT_NEAR(status.clip_coefficient, clip, 1.1e-6 * clip);
}

/// Expects a stored value to be a rounding of some number in [expected - bound, expected + bound].
bool is_rounding_of(storage_format format, float stored, double expected, double bound) {
  if (format == storage_format::f32) {
    return std::abs(static_cast<double>(stored) - expected) <= bound;
  }
  return stored >= rounded(format, static_cast<float>(expected - bound)) &&
         stored <= rounded(format, static_cast<float>(expected + bound));
}

void check_tensor(const problem_tensor& tensor, const reference_options& options,
                  const operand_set& before, const operand_set& after) {
  const update_signature& formats = tensor.signature;
  const bool has_master = formats.master != storage_format::none;
  // The operand that carries the parameter from step to step.
  const std::size_t carrier = has_master ? master_operand : parameter_operand;
  const storage_format carrier_format = has_master ? formats.master : formats.parameter;

  const auto gradient = decode(formats.gradient, before[gradient_operand]);
  const auto parameter_before = decode(carrier_format, before[carrier]);
  const auto exp_avg_before = decode(formats.exp_avg, before[exp_avg_operand]);
  const auto exp_avg_sq_before = decode(formats.exp_avg_sq, before[exp_avg_sq_operand]);
  const auto parameter = decode(carrier_format, after[carrier]);
  const auto exp_avg = decode(formats.exp_avg, after[exp_avg_operand]);
  const auto exp_avg_sq = decode(formats.exp_avg_sq, after[exp_avg_sq_operand]);
  for (std::uint64_t i = 0; i < tensor.numel; ++i) {
    const reference_element start = {parameter_before[i], exp_avg_before[i], exp_avg_sq_before[i]};
    const reference_element expected = reference_step(options, gradient[i], start);
    const reference_element bound = reference_error_bound(options, gradient[i], start);
    ASSERT_TRUE(is_rounding_of(formats.exp_avg, exp_avg[i], expected.exp_avg, bound.exp_avg))
        << "tensor '" << tensor.name << "' exp_avg[" << i << "] " << exp_avg[i] << ", float64 "
        << expected.exp_avg;
    ASSERT_TRUE(
        is_rounding_of(formats.exp_avg_sq, exp_avg_sq[i], expected.exp_avg_sq, bound.exp_avg_sq))
        << "tensor '" << tensor.name << "' exp_avg_sq[" << i << "] " << exp_avg_sq[i]
        << ", float64 " << expected.exp_avg_sq;
    ASSERT_TRUE(is_rounding_of(carrier_format, parameter[i], expected.parameter, bound.parameter))
        << "tensor '" << tensor.name << "' parameter[" << i << "] " << parameter[i] << ", float64 "
        << expected.parameter << " from " << start.parameter;
  }
  if (has_master) {
    ASSERT_EQ(after[parameter_operand], encode(formats.parameter, parameter))
        << "tensor '" << tensor.name << "': the parameter is not its rounded master";
  }
}

}  // namespace

void launch_and_check_against_float64(executor_adapter& adapter, const step_in_force& in_force) {
  const test_problem& problem = adapter.problem();
  const std::vector<operand_set> before = adapter.read_all();
  const step_status status_before = adapter.get().status();
  adapter.launch();
  const std::vector<operand_set> after = adapter.read_all();
  const step_status status = adapter.get().status();

  EXPECT_FALSE(status.last_skipped);
  EXPECT_EQ(status.step, status_before.step + 1);
  EXPECT_EQ(status.loss_scale, in_force.options.loss_scale);
  check_norm_and_clip(problem, in_force.options, before, status);
  ASSERT_EQ(status.groups.size(), in_force.groups.size());
  for (std::size_t g = 0; g < status.groups.size(); ++g) {
    const double expected = expected_learning_rate(in_force.groups[g], status.groups[g].step);
    EXPECT_NEAR(status.groups[g].learning_rate, expected, 1e-14 * expected + 1e-18)
        << in_force.groups[g].name;
  }
  // The clip was judged above; the update is judged with the clip that it was given.
  const double factor = status.clip_coefficient / in_force.options.loss_scale;
  for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
    const group_id group = problem.tensors[t].group;
    const reference_options options =
        options_of(in_force.groups[group], status.groups[group].step, factor);
    check_tensor(problem.tensors[t], options, before[t], after[t]);
    if (::testing::Test::HasFatalFailure()) return;
    operand_bytes gradient = before[t][gradient_operand];
    if (in_force.options.zero_gradients) std::fill(gradient.begin(), gradient.end(), std::byte{0});
    EXPECT_EQ(after[t][gradient_operand], gradient)
        << "gradient of tensor '" << problem.tensors[t].name << "'";
  }
}

void run_and_check_against_float64(executor_adapter& adapter, int steps) {
  const test_problem& problem = adapter.problem();
  for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
    SCOPED_TRACE("step " + std::to_string(step + 1));
    for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
      adapter.write(t, gradient_operand, problem.gradient_at(t, step));
    }
    launch_and_check_against_float64(adapter, step_in_force(problem));
  }
  adapter.expect_guards_intact();
}

}  // namespace stepgraph::test
