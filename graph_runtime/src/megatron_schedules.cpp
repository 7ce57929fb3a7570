#include "stepgraph/megatron_schedules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "schedule_checks.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::schedules {
namespace {

constexpr const char* learning_rate_function = "megatron_learning_rate";
constexpr const char* weight_decay_function = "megatron_weight_decay";

void check(const megatron_learning_rate_options& options) {
  const char* function = learning_rate_function;
  detail::require_not_negative(function, "initial", options.initial);
  detail::require_not_negative(function, "maximum", options.maximum);
  detail::require_not_negative(function, "minimum", options.minimum);
  detail::require_count(function, "warmup", options.warmup, 0);
  if (options.style == megatron_learning_rate_style::constant) return;
  detail::require_count(function, "decay", options.decay);
  if (options.decay <= options.warmup) {
    throw usage_error(fmt::format("{}: decay is {}, expected more than the {} of warmup", function,
                                  options.decay, options.warmup));
  }
  if (options.style == megatron_learning_rate_style::wsd) {
    detail::require_count(function, "wsd_decay", options.wsd_decay);
  }
}

schedule_curve curve_of(megatron_wsd_style style) {
  switch (style) {
    case megatron_wsd_style::linear:
      return schedule_curve::anneal_linear;
    case megatron_wsd_style::cosine:
      return schedule_curve::anneal_cosine;
    case megatron_wsd_style::exponential:
      return schedule_curve::anneal_exponential;
    case megatron_wsd_style::minus_sqrt:
      return schedule_curve::anneal_minus_sqrt;
  }
  throw usage_error(fmt::format("{}: wsd_style is {}, expected a megatron_wsd_style",
                                learning_rate_function, static_cast<int>(style)));
}

/// The fall from maximum to minimum along `curve`: active from `begin`, running from clock `start`
/// (which may lie before 0) to clock `decay`.
schedule_segment fall(const megatron_learning_rate_options& options, schedule_curve curve,
                      std::uint64_t begin, double start) {
  return {.curve = curve,
          .begin = begin,
          .from = options.maximum,
          .to = options.minimum,
          .origin = start - static_cast<double>(begin),
          .length = static_cast<double>(options.decay) - start};
}

/// What lies between the warm-up, after which clock `begin` is the first, and the minimum.
void append_decay(schedule& result, const megatron_learning_rate_options& options,
                  std::uint64_t begin) {
  const auto warmup = static_cast<double>(options.warmup);
  switch (options.style) {
    case megatron_learning_rate_style::linear:
      detail::append_segment(result, fall(options, schedule_curve::anneal_linear, begin, warmup));
      return;
    case megatron_learning_rate_style::cosine:
      detail::append_segment(result, fall(options, schedule_curve::anneal_cosine, begin, warmup));
      return;
    case megatron_learning_rate_style::inverse_square_root:
      detail::append_segment(result, {.curve = schedule_curve::inverse_square_root,
                                      .begin = begin,
                                      .from = options.maximum * std::sqrt(std::max(warmup, 1.0)),
                                      .to = options.minimum,
                                      .origin = -static_cast<double>(begin)});
      return;
    case megatron_learning_rate_style::wsd: {
      // A decay longer than everything before it has begun before clock 0.
      const std::uint64_t stable = options.decay - std::min(options.decay, options.wsd_decay);
      const bool any_stable = options.wsd_decay <= options.decay;
      const std::uint64_t anneal = std::max(begin, any_stable ? stable + 1 : 0);
      const double start =
          static_cast<double>(options.decay) - static_cast<double>(options.wsd_decay);
      detail::append_segment(result, detail::constant_segment(begin, options.maximum));
      detail::append_segment(result, fall(options, curve_of(options.wsd_style), anneal, start));
      return;
    }
    default:
      throw usage_error(fmt::format("{}: style is {}, expected a megatron_learning_rate_style",
                                    learning_rate_function, static_cast<int>(options.style)));
  }
}

}  // namespace

schedule megatron_learning_rate(const megatron_learning_rate_options& options) {
  check(options);
  schedule result;
  result.clock = options.clock;
  std::uint64_t begin = 0;
  if (options.warmup > 0) {
    // The warm-up includes its last clock.
    begin = options.warmup + 1;
    result.segments.push_back({.curve = schedule_curve::linear,
                               .from = options.initial,
                               .to = options.maximum,
                               .length = static_cast<double>(options.warmup)});
  }
  if (options.style == megatron_learning_rate_style::constant) {
    detail::append_segment(result, detail::constant_segment(begin, options.maximum));
    return result;
  }
  append_decay(result, options, begin);
  detail::append_segment(result, detail::constant_segment(options.decay + 1, options.minimum));
  return result;
}

schedule megatron_weight_decay(const megatron_weight_decay_options& options) {
  const char* function = weight_decay_function;
  detail::require_not_negative(function, "start", options.start);
  detail::require_not_negative(function, "end", options.end);
  detail::require_not_negative(function, "multiplier", options.multiplier);
  if (options.style == megatron_weight_decay_style::constant) {
    if (options.start != options.end) {
      throw usage_error(fmt::format("{}: end is {}, expected the {} of start in a constant style",
                                    function, options.end, options.start));
    }
    return scaled(constant(options.end, options.clock), options.multiplier);
  }
  detail::require_count(function, "increment", options.increment);

  const auto increment = static_cast<double>(options.increment);
  schedule result;
  result.clock = options.clock;
  switch (options.style) {
    case megatron_weight_decay_style::linear:
      result.segments.push_back({.curve = schedule_curve::linear,
                                 .from = options.start,
                                 .to = options.end,
                                 .length = increment});
      break;
    case megatron_weight_decay_style::cosine:
      result.segments.push_back({.curve = schedule_curve::rise_cosine,
                                 .from = options.start,
                                 .to = options.end,
                                 .length = increment});
      break;
    default:
      throw usage_error(fmt::format("{}: style is {}, expected a megatron_weight_decay_style",
                                    function, static_cast<int>(options.style)));
  }
  detail::append_segment(result, detail::constant_segment(options.increment + 1, options.end));
  return scaled(std::move(result), options.multiplier);
}

}  // namespace stepgraph::schedules
