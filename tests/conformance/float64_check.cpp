#include "conformance/float64_check.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include "common/reference_adam.hpp"

namespace stepgraph::test {
namespace {

/// A value that a group should use in the update after `before`. Schedules are judged elsewhere;
/// here counts that their clock is right.
double expected_value(const std::optional<schedule>& scheduled, double value,
                      const step_status& before, std::size_t group) {
  if (!scheduled) return value;
  const bool samples = scheduled->clock == schedule_clock::samples;
  return value_at(*scheduled, samples ? before.samples : before.groups[group].step);
}

reference_options options_of(const group_options& group, const group_status& status, double factor,
                             bool amsgrad) {
  reference_options options;
  options.learning_rate = status.learning_rate;
  options.beta1 = group.beta1;
  options.beta2 = group.beta2;
  options.eps = group.eps;
  options.weight_decay = status.weight_decay;
  options.decoupled = group.mode == weight_decay_mode::decoupled;
  options.bias_correction = group.bias_correction;
  options.maximize = group.maximize;
  options.gradient_factor = factor;
  options.amsgrad = amsgrad;
  options.step = status.step;
  return options;
}

/// Norm and number of zeros of the stored gradients of some groups.
struct measured_gradients {
  double norm = 0.0;
  std::uint64_t zeros = 0;
};

/// Of the groups that share a norm group with this name, or of all.
measured_gradients measure(const test_problem& problem, norm_kind kind,
                           const std::vector<operand_set>& state, const std::string* norm_group) {
  long double sum = 0.0L;
  double largest = 0.0;
  measured_gradients found;
  for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
    const problem_tensor& tensor = problem.tensors[t];
    if (norm_group != nullptr && problem.groups[tensor.group].norm_group != *norm_group) continue;
    for (const float value : decode(tensor.signature.gradient, state[t][gradient_operand])) {
      sum += static_cast<long double>(value) * value;
      largest = std::max(largest, std::abs(static_cast<double>(value)));
      found.zeros += value == 0.0f ? 1 : 0;
    }
  }
  found.norm = kind == norm_kind::l2 ? static_cast<double>(std::sqrt(sum)) : largest;
  return found;
}

void check_norm_and_clip(const executor_adapter& adapter, const step_plan& plan,
                         const step_options& options, const std::vector<operand_set>& before,
                         const step_status& status) {
  ASSERT_EQ(status.norms.size(), plan.norm_groups.size());
  if (!measures_gradients(options)) {
    EXPECT_EQ(status.grad_norm, 0.0);
    EXPECT_EQ(status.clip_coefficient, 1.0);
    EXPECT_EQ(status.zeros, 0u);
    for (const double norm : status.norms) EXPECT_EQ(norm, 0.0);
    return;
  }
  const test_problem& problem = adapter.problem();
  const measured_gradients whole = measure(problem, options.norm, before, nullptr);
  const double norm = whole.norm / options.loss_scale;
  EXPECT_NEAR(status.grad_norm, norm, 1e-12 * norm);
  EXPECT_EQ(status.zeros, options.count_zeros ? whole.zeros : 0u);
  for (std::size_t i = 0; i < status.norms.size(); ++i) {
    const double part = measure(problem, options.norm, before, &plan.norm_groups[i]).norm;
    EXPECT_NEAR(status.norms[i], part / options.loss_scale, 1e-12 * norm) << plan.norm_groups[i];
  }
  const double clip =
      options.max_grad_norm > 0.0 ? std::min(1.0, options.max_grad_norm / (norm + 1e-6)) : 1.0;
  EXPECT_NEAR(status.clip_coefficient, clip, 0x1p-23 * clip);
}

/// What a value may be before it is stored.
struct interval {
  double lowest = 0.0;
  double highest = 0.0;
};

interval around(double value, double bound) { return {value - bound, value + bound}; }

/// Names what is checked, for messages.
struct checked_operand {
  const problem_tensor& tensor;
  std::size_t operand;
};

std::ostream& operator<<(std::ostream& out, const checked_operand& checked) {
  return out << "tensor '" << checked.tensor.name << "' (" << checked.tensor.numel << " x "
             << name_of(checked.tensor.signature) << "): " << operand_names[checked.operand];
}

/// Expects each stored value, `scale` times the value before it was stored, to be a rounding of
/// some number in its interval.
void check_rounding(const checked_operand& checked, storage_format format,
                    const std::vector<float>& stored, const std::vector<interval>& expected,
                    float scale = 1.0f) {
  for (std::size_t i = 0; i < stored.size(); ++i) {
    const auto [lowest, highest] = expected[i];
    const bool matches =
        format == storage_format::f32
            ? stored[i] >= lowest && stored[i] <= highest
            : stored[i] >= rounded(format, static_cast<float>(lowest) * scale) &&
                  stored[i] <= rounded(format, static_cast<float>(highest) * scale);
    ASSERT_TRUE(matches) << checked << "[" << i << "] is " << stored[i] << ", float64 between "
                         << lowest * scale << " and " << highest * scale;
  }
}

/// The same for a bf16 parameter that was rounded up or down at random.
void check_stochastic_rounding(const checked_operand& checked, const std::vector<float>& stored,
                               const std::vector<interval>& expected) {
  for (std::size_t i = 0; i < stored.size(); ++i) {
    const double last_place = std::max(std::ldexp(1.0, std::ilogb(stored[i]) - 7), 0x1p-133);
    ASSERT_TRUE(stored[i] > expected[i].lowest - last_place &&
                stored[i] < expected[i].highest + last_place)
        << checked << "[" << i << "] is " << stored[i] << ", float64 between " << expected[i].lowest
        << " and " << expected[i].highest;
  }
}

/// What is stored, before scaling, of a second moment in an interval: its root, zero only if it is
/// zero.
interval roots_of(const interval& moment) {
  constexpr double error = 0x1p-22;
  if (moment.highest <= 0.0) return {};
  return {moment.lowest <= 0.0 ? 0.0 : std::sqrt(moment.lowest) * (1.0 - error),
          std::max(std::sqrt(moment.highest), 0x1.6a09e6p-51) * (1.0 + error)};
}

/// Expects block-scaled values to be roundings at the block's scale, which is the smallest that
/// fits.
template <storage_format Format>
void check_blocks(const checked_operand& checked, const operand_set& after,
                  const std::vector<interval>& expected) {
  const bool root = is_second_moment(checked.operand);
  const operand_bytes& scales = after[scales_of(checked.operand)];
  const std::vector<float> stored = decode(Format, after[checked.operand]);
  const float smallest = math::format_traits<Format>::decode(1);
  for (std::size_t first = 0; first < stored.size(); first += scale_block_elements) {
    const std::size_t end = std::min<std::size_t>(stored.size(), first + scale_block_elements);
    const auto kept = [&](std::size_t i) { return root ? roots_of(expected[i]) : expected[i]; };
    interval largest;
    for (std::size_t i = first; i < end; ++i) {
      const auto [lowest, highest] = kept(i);
      largest.lowest = std::max({largest.lowest, lowest, -highest});
      largest.highest = std::max({largest.highest, -lowest, highest});
    }
    const auto scale = static_cast<std::uint32_t>(scales[first / scale_block_elements]);
    const auto scale_for = [](double magnitude) {
      return math::block_scale_of<Format>(math::float_bits(static_cast<float>(magnitude)));
    };
    ASSERT_GE(scale, scale_for(largest.lowest)) << checked << ", block of element " << first;
    ASSERT_LE(scale, scale_for(largest.highest)) << checked << ", block of element " << first;
    const float factor = math::inverse_block_factor(scale);
    const auto code_of = [&](double value) {
      const float code = rounded(Format, static_cast<float>(value) * factor);
      return root && value > 0.0 && code == 0.0f ? smallest : code;
    };
    for (std::size_t i = first; i < end; ++i) {
      const auto [lowest, highest] = kept(i);
      ASSERT_TRUE(stored[i] >= code_of(lowest) && stored[i] <= code_of(highest))
          << checked << "[" << i << "] is " << stored[i] << " / " << factor << ", float64 between "
          << lowest << " and " << highest << (root ? " (roots)" : "");
    }
  }
}

void check_state(const checked_operand& checked, const operand_set& after,
                 const std::vector<interval>& expected) {
  const storage_format format = formats_of(checked.tensor.signature)[checked.operand];
  if (is_block_scaled(format)) {
    with_block_format(format,
                      [&](auto known) { check_blocks<known.value>(checked, after, expected); });
  } else if (format == storage_format::remainder) {
    check_rounding(checked, storage_format::f32,
                   values_of(checked.tensor.signature, after, checked.operand), expected);
  } else if (format != storage_format::none) {
    check_rounding(checked, format, decode(format, after[checked.operand]), expected);
  }
}

/// The parameter as stored: a rounding of the weight, or half of a remainder master.
void check_parameter(const problem_tensor& tensor, bool stochastic, const operand_set& before,
                     const operand_set& after, const std::vector<interval>& expected) {
  const update_signature& formats = tensor.signature;
  const checked_operand checked = {tensor, parameter_operand};
  if (formats.master == storage_format::remainder) return;
  if (formats.master == storage_format::f32) {
    operand_set exact;
    encode_weight(formats, values_of(formats, after, master_operand), scaling_of(before).scale,
                  exact);
    ASSERT_EQ(after[parameter_operand], exact[parameter_operand])
        << checked << " is not its rounded master";
    return;
  }
  const std::vector<float> stored = decode(formats.parameter, after[parameter_operand]);
  if (stochastic && formats.parameter == storage_format::bf16 &&
      formats.master == storage_format::none) {
    check_stochastic_rounding(checked, stored, expected);
    return;
  }
  check_rounding(checked, formats.parameter, stored, expected, scaling_of(before).scale);
}

/// What an FP8 parameter owes its recipe.
void check_scaling(const problem_tensor& tensor, const operand_set& before,
                   const operand_set& after, const std::vector<interval>& expected) {
  if (!is_fp8(tensor.signature.parameter) || tensor.numel == 0) return;
  const checked_operand checked = {tensor, parameter_scaling_operand};
  const scaling_values was = scaling_of(before);
  const scaling_values is = scaling_of(after);
  interval amax = {was.amax, was.amax};
  for (const auto& [lowest, highest] : expected) {
    amax.lowest = std::max({amax.lowest, lowest, -highest});
    amax.highest = std::max({amax.highest, -lowest, highest});
  }
  ASSERT_EQ(is.scale, was.scale) << checked;
  ASSERT_EQ(is.scale_inv, 1.0f / was.scale) << checked;
  ASSERT_GE(is.amax, amax.lowest) << checked;
  ASSERT_LE(is.amax, amax.highest) << checked;
}

void check_tensor(const problem_tensor& tensor, const reference_options& options, bool stochastic,
                  const operand_set& before, const operand_set& after) {
  const update_signature& formats = tensor.signature;
  const reference_adam reference(options);
  const auto values = [&](std::size_t operand) { return values_of(formats, before, operand); };
  const std::vector<float> gradient = values(gradient_operand);
  const std::vector<float> weight_before = values(carrier_of(formats));
  const std::vector<float> exp_avg_before = values(exp_avg_operand);
  const std::vector<float> exp_avg_sq_before = values(exp_avg_sq_operand);
  const std::vector<float> maximum_before = values(max_exp_avg_sq_operand);
  std::vector<interval> weight;
  std::vector<interval> exp_avg;
  std::vector<interval> exp_avg_sq;
  std::vector<interval> maximum;
  for (std::uint64_t i = 0; i < tensor.numel; ++i) {
    const reference_element start = {weight_before[i], exp_avg_before[i], exp_avg_sq_before[i],
                                     options.amsgrad ? maximum_before[i] : 0.0};
    const reference_element expected = reference.step(gradient[i], start);
    const reference_element bound = reference.error_bound(gradient[i], start, expected);
    weight.push_back(around(expected.parameter, bound.parameter));
    exp_avg.push_back(around(expected.exp_avg, bound.exp_avg));
    exp_avg_sq.push_back(around(expected.exp_avg_sq, bound.exp_avg_sq));
    maximum.push_back(around(expected.max_exp_avg_sq, bound.max_exp_avg_sq));
  }
  check_state({tensor, exp_avg_operand}, after, exp_avg);
  check_state({tensor, exp_avg_sq_operand}, after, exp_avg_sq);
  check_state({tensor, max_exp_avg_sq_operand}, after, maximum);
  check_state({tensor, master_operand}, after, weight);
  check_parameter(tensor, stochastic, before, after, weight);
  check_scaling(tensor, before, after, weight);
}

/// The gradient as the step should leave it: as it was, zeroed, or unscaled and clipped.
void check_gradient(const problem_tensor& tensor, const step_options& options, double factor,
                    const operand_set& before, const operand_set& after) {
  const bool alone = is_gradient_alone(tensor.signature);
  operand_bytes expected = before[gradient_operand];
  if (options.unscale_gradients) {
    std::vector<interval> unscaled;
    for (const float value : decode(tensor.signature.gradient, expected)) {
      const double exact = static_cast<double>(value) * factor;
      unscaled.push_back(around(exact, std::abs(exact) * 0x1p-22 + 0x1p-149));
    }
    check_rounding({tensor, gradient_operand}, tensor.signature.gradient,
                   decode(tensor.signature.gradient, after[gradient_operand]), unscaled);
    return;
  }
  if (options.zero_gradients && !alone) std::fill(expected.begin(), expected.end(), std::byte{0});
  EXPECT_EQ(after[gradient_operand], expected) << "gradient of tensor '" << tensor.name << "'";
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
  EXPECT_EQ(status.samples, status_before.samples + in_force.options.samples_per_step);
  check_norm_and_clip(adapter, adapter.get().plan(), in_force.options, before, status);
  ASSERT_EQ(status.groups.size(), in_force.groups.size());
  for (std::size_t g = 0; g < status.groups.size(); ++g) {
    const group_options& group = in_force.groups[g];
    const double learning_rate =
        expected_value(group.learning_rate_schedule, group.learning_rate, status_before, g);
    const double weight_decay =
        expected_value(group.weight_decay_schedule, group.weight_decay, status_before, g);
    EXPECT_EQ(status.groups[g].learning_rate, learning_rate) << group.name;
    EXPECT_EQ(status.groups[g].weight_decay, weight_decay) << group.name;
  }
  // The clip was judged above; the update is judged with the clip that it was given.
  const double factor = status.clip_coefficient / in_force.options.loss_scale;
  for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
    const problem_tensor& tensor = problem.tensors[t];
    const reference_options options =
        options_of(in_force.groups[tensor.group], status.groups[tensor.group], factor,
                   tensor.signature.max_exp_avg_sq != storage_format::none);
    if (!is_gradient_alone(tensor.signature)) {
      check_tensor(tensor, options, in_force.options.stochastic_rounding, before[t], after[t]);
    }
    check_gradient(tensor, in_force.options, factor, before[t], after[t]);
    if (::testing::Test::HasFatalFailure()) return;
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
