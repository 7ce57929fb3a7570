#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "stepgraph/math/schedule.hpp"

namespace stepgraph::test {

/// The learning rate after n updates, from the words of `learning_rate_schedule` and the C library.
inline double reference_learning_rate(const learning_rate_schedule& schedule, std::uint64_t n) {
  const std::uint64_t w = schedule.warmup_steps;
  const std::uint64_t d = schedule.decay_steps;
  if (w > 0 && n <= w) {
    const double part = static_cast<double>(n) / static_cast<double>(w);
    return schedule.initial * (1.0 - part) + schedule.maximum * part;
  }
  if (schedule.shape == schedule_shape::constant) return schedule.maximum;
  if (n > d) return schedule.minimum;
  const double ratio = d > w ? static_cast<double>(n - w) / static_cast<double>(d - w) : 1.0;
  const double share = schedule.shape == schedule_shape::linear
                           ? 1.0 - ratio
                           : (1.0 + std::cos(std::numbers::pi * ratio)) / 2.0;
  return share * schedule.maximum + (1.0 - share) * schedule.minimum;
}

}  // namespace stepgraph::test
