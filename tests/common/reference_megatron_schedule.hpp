#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "stepgraph/megatron_schedules.hpp"

/// Megatron-LM's rules from the words of megatron_schedules.hpp, clock by clock, with the C
/// library.
namespace stepgraph::test {

inline double reference_learning_rate(const schedules::megatron_learning_rate_options& options,
                                      std::uint64_t clock) {
  using style = schedules::megatron_learning_rate_style;
  using wsd = schedules::megatron_wsd_style;
  const double pi = std::numbers::pi;
  const auto n = static_cast<double>(clock);
  const auto warmup = static_cast<double>(options.warmup);
  const auto decay = static_cast<double>(options.decay);
  const double high = options.maximum;
  const double low = options.minimum;
  if (warmup > 0 && n <= warmup) {
    return options.initial + (high - options.initial) * n / warmup;
  }
  if (options.style == style::constant) return high;
  if (n > decay) return low;
  if (options.style == style::inverse_square_root) {
    return std::max(low,
                    high * std::pow(std::max(warmup, 1.0), 0.5) / std::pow(std::max(n, 1.0), 0.5));
  }
  const double ratio = (n - warmup) / (decay - warmup);
  double share = 1.0;
  if (options.style == style::linear) share = 1.0 - ratio;
  if (options.style == style::cosine) share = 0.5 * (std::cos(pi * ratio) + 1.0);
  if (options.style == style::wsd) {
    const auto length = static_cast<double>(options.wsd_decay);
    const double start = decay - length;
    if (n > start) {
      const double part = (n - start) / length;
      if (options.wsd_style == wsd::linear) share = 1.0 - part;
      if (options.wsd_style == wsd::cosine) share = 0.5 * (std::cos(pi * part) + 1.0);
      if (options.wsd_style == wsd::exponential) share = 2.0 * std::pow(0.5, part) - 1.0;
      if (options.wsd_style == wsd::minus_sqrt) share = 1.0 - std::sqrt(part);
    }
  }
  return low + share * (high - low);
}

inline double reference_weight_decay(const schedules::megatron_weight_decay_options& options,
                                     std::uint64_t clock) {
  using style = schedules::megatron_weight_decay_style;
  const auto n = static_cast<double>(clock);
  const auto increment = static_cast<double>(options.increment);
  double value = options.end;
  if (options.style != style::constant && n <= increment) {
    const double ratio = n / increment;
    const double share = options.style == style::linear
                             ? ratio
                             : 0.5 * (std::cos(std::numbers::pi * (1.0 - ratio)) + 1.0);
    value = options.start + share * (options.end - options.start);
  }
  return value * options.multiplier;
}

}  // namespace stepgraph::test
