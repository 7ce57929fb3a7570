#pragma once

#include "stepgraph/megatron_schedules.hpp"

namespace stepgraph::test {

using learning_rate_style = schedules::megatron_learning_rate_style;

/// A learning rate that rises from `initial` to `maximum` in `warmup` updates and is `minimum`
/// after `decay` of them.
inline schedule warmed_up(learning_rate_style style, double initial, double maximum, double minimum,
                          std::uint64_t warmup, std::uint64_t decay) {
  return schedules::megatron_learning_rate({.style = style,
                                            .initial = initial,
                                            .maximum = maximum,
                                            .minimum = minimum,
                                            .warmup = warmup,
                                            .decay = decay,
                                            .clock = schedule_clock::updates});
}

/// From `maximum` to zero in `decay` updates.
inline schedule falling_from(double maximum, std::uint64_t decay) {
  return warmed_up(learning_rate_style::linear, 0.0, maximum, 0.0, 0, decay);
}

}  // namespace stepgraph::test
