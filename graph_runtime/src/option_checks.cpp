#include "option_checks.hpp"

#include <fmt/format.h>

#include <cmath>

#include "stepgraph/error.hpp"

namespace stepgraph::detail {
namespace {

void check_not_negative(const std::string& group, const char* option, double value) {
  if (!(value >= 0.0) || !std::isfinite(value)) {
    throw usage_error(fmt::format("group '{}': {} is {}, expected a finite number of at least 0",
                                  group, option, value));
  }
}

void check_beta(const std::string& group, const char* option, double value) {
  if (!(value >= 0.0 && value < 1.0)) {
    throw usage_error(
        fmt::format("group '{}': {} is {}, expected a number in [0, 1)", group, option, value));
  }
}

}  // namespace

void check_learning_rate(const std::string& group, double value) {
  check_not_negative(group, "learning_rate", value);
}

void check_weight_decay(const std::string& group, double value) {
  check_not_negative(group, "weight_decay", value);
}

void check_betas(const std::string& group, double beta1, double beta2) {
  check_beta(group, "beta1", beta1);
  check_beta(group, "beta2", beta2);
}

void check_eps(const std::string& group, double value) { check_not_negative(group, "eps", value); }

void check_schedule(const std::string& group, const char* option, const schedule& checked) {
  try {
    validate(checked);
  } catch (const usage_error& error) {
    throw usage_error(fmt::format("group '{}': {}: {}", group, option, error.what()));
  }
}

void check_group_options(const group_options& options) {
  check_learning_rate(options.name, options.learning_rate);
  check_weight_decay(options.name, options.weight_decay);
  check_betas(options.name, options.beta1, options.beta2);
  check_eps(options.name, options.eps);
  if (options.learning_rate_schedule) {
    check_schedule(options.name, "learning_rate_schedule", *options.learning_rate_schedule);
  }
  if (options.weight_decay_schedule) {
    check_schedule(options.name, "weight_decay_schedule", *options.weight_decay_schedule);
  }
}

void check_loss_scale(double value) {
  // It is kept in f32, where it must still be one.
  const auto kept = static_cast<float>(value);
  if (!(kept > 0.0f) || !std::isfinite(kept)) {
    throw usage_error(
        fmt::format("loss_scale is {}, expected a finite number above 0 in f32", value));
  }
}

void check_max_grad_norm(double value) {
  if (!(value >= 0.0)) {
    throw usage_error(fmt::format(
        "max_grad_norm is {}, expected a number of at least 0 (0: no clipping)", value));
  }
}

void check_skip_above_norm(double value) {
  if (!(value >= 0.0)) {
    throw usage_error(fmt::format(
        "skip_above_norm is {}, expected a number of at least 0 (0: never skip)", value));
  }
}

void check_step_options(const step_options& options) {
  check_loss_scale(options.loss_scale);
  check_max_grad_norm(options.max_grad_norm);
  check_skip_above_norm(options.skip_above_norm);
  const loss_scaling& scaling = options.scaling;
  if (scaling.rule != loss_scale_rule::fixed) {
    if (!(scaling.growth_factor >= 1.0) || !std::isfinite(scaling.growth_factor)) {
      throw usage_error(fmt::format("scaling.growth_factor is {}, expected a number of at least 1",
                                    scaling.growth_factor));
    }
    if (!(scaling.backoff_factor > 0.0 && scaling.backoff_factor <= 1.0)) {
      throw usage_error(fmt::format("scaling.backoff_factor is {}, expected a number in (0, 1]",
                                    scaling.backoff_factor));
    }
    if (scaling.growth_interval == 0) {
      throw usage_error("scaling.growth_interval is 0, expected at least 1");
    }
    if (scaling.hysteresis == 0) throw usage_error("scaling.hysteresis is 0, expected at least 1");
    if (!(scaling.minimum >= 0.0) || !std::isfinite(scaling.minimum)) {
      throw usage_error(fmt::format("scaling.minimum is {}, expected a finite number of at least 0",
                                    scaling.minimum));
    }
    if (options.loss_scale_input != nullptr) {
      throw usage_error(
          "loss_scale_input is given with a scaling rule, expected the rule fixed: whoever writes "
          "the input owns the scale");
    }
  }
  if (options.zero_gradients && options.unscale_gradients) {
    throw usage_error("zero_gradients and unscale_gradients are both on, expected one of them");
  }
}

void check_runnable(const step_plan& plan) {
  if (plan.shapes_only) {
    throw usage_error("the plan was built to inspect shapes, expected a plan with memory");
  }
}

void check_address(const std::string& tensor, const char* operand, const void* data,
                   std::uint64_t numel, storage_format format) {
  if (numel == 0) return;
  if (data == nullptr) {
    throw usage_error(
        fmt::format("tensor '{}': {} is a null pointer, expected memory of {} "
                    "elements of {}",
                    tensor, operand, numel, name_of(format)));
  }
  const std::size_t size = element_size(format);
  if (reinterpret_cast<std::uintptr_t>(data) % size != 0) {
    throw usage_error(
        fmt::format("tensor '{}': {} is at {}, expected a multiple of {} bytes for {}", tensor,
                    operand, data, size, name_of(format)));
  }
}

}  // namespace stepgraph::detail
