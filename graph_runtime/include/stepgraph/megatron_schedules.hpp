#pragma once

#include <cstdint>

#include "stepgraph/schedule.hpp"

/// The schedules of Megatron-LM's OptimizerParamScheduler
/// (megatron/core/optimizer_param_scheduler.py), with its formulas evaluated in its order, in
/// double. n is the clock; Megatron-LM counts samples.
namespace stepgraph::schedules {

/// `lr_decay_style`.
enum class megatron_learning_rate_style : std::uint8_t {
  constant,
  linear,
  cosine,
  inverse_square_root,
  wsd,  ///< warm-up, stable, decay
};

/// `lr_wsd_decay_style`.
enum class megatron_wsd_style : std::uint8_t { linear, cosine, exponential, minus_sqrt };

/// `wd_incr_style`.
enum class megatron_weight_decay_style : std::uint8_t { constant, linear, cosine };

/// Learning rates, and counts in units of the clock.
struct megatron_learning_rate_options {
  megatron_learning_rate_style style = megatron_learning_rate_style::linear;
  double initial = 0.0;       ///< `init_lr`: where the warm-up starts
  double maximum = required;  ///< `max_lr` of the group
  double minimum = 0.0;       ///< `min_lr` of the group
  std::uint64_t warmup = 0;   ///< `lr_warmup_steps`
  std::uint64_t decay = 0;    ///< `lr_decay_steps`, counted from 0; unused when constant
  megatron_wsd_style wsd_style = megatron_wsd_style::exponential;
  std::uint64_t wsd_decay = 0;  ///< `wsd_decay_steps`: the last part of `decay`
  schedule_clock clock = schedule_clock::samples;
};

/// With i, M, m the initial, maximum and minimum, w = warmup, D = decay, S = wsd_decay; the first
/// line that holds decides:
///   w > 0 and n <= w      i + (M - i) * n / w
///   constant              M
///   n > D                 m
///   inverse square root   max(m, M * sqrt(max(w, 1)) / sqrt(max(n, 1)))
///   otherwise             m + c * (M - m), with r = (n - w) / (D - w) and c:
///                         linear 1 - r; cosine (cos(pi * r) + 1) / 2;
///                         WSD 1 while n <= D - S, then with q = (n - (D - S)) / S
///                         linear 1 - q, cosine (cos(pi * q) + 1) / 2, exponential 2 * 0.5^q - 1,
///                         minus_sqrt 1 - sqrt(q)
/// Refuses rates that are negative or not finite, unless constant a decay that ends before or with
/// the warm-up, and for WSD a `wsd_decay` of 0.
schedule megatron_learning_rate(const megatron_learning_rate_options& options);

/// Weight decays, and a count in units of the clock.
struct megatron_weight_decay_options {
  megatron_weight_decay_style style = megatron_weight_decay_style::constant;
  double start = required;      ///< `start_wd`
  double end = required;        ///< `end_wd`
  std::uint64_t increment = 0;  ///< `wd_incr_steps`; unused when constant
  double multiplier = 1.0;      ///< `wd_mult` of the group
  schedule_clock clock = schedule_clock::samples;
};

/// With s and e the start and the end, W = increment, r = n / W; the first line that holds decides,
/// and the multiplier comes last:
///   n > W or constant   e
///   otherwise           s + c * (e - s), linear c = r, cosine c = (cos(pi * (1 - r)) + 1) / 2
/// Refuses numbers that are negative or not finite, a constant whose start and end differ, and
/// otherwise an `increment` of 0.
schedule megatron_weight_decay(const megatron_weight_decay_options& options);

}  // namespace stepgraph::schedules
