#pragma once

#include <cstdint>
#include <type_traits>

#include "stepgraph/math/elementary.hpp"

namespace stepgraph {

/// The curve of a segment as a function of its local clock t, the steps (or samples) since the
/// segment began. With x = t - origin, kept within [0, length], and r = x / length:
enum class schedule_curve : std::uint32_t {
  constant,            ///< from
  linear,              ///< from + (to - from) * x / length
  rise_cosine,         ///< from + c * (to - from) with c = (cos(pi * (1 - r)) + 1) / 2
  anneal_linear,       ///< to + c * (from - to) with c = 1 - r
  anneal_cosine,       ///< the same with c = (cos(pi * r) + 1) / 2
  anneal_exponential,  ///< the same with c = 2 * 0.5^r - 1
  anneal_minus_sqrt,   ///< the same with c = 1 - sqrt(r)
  anneal_polynomial,   ///< the same with c = (1 - r)^ratio
  cosine_wave,         ///< the same with c = (cos(pi * t / period) + 1) / 2, at every t
  cosine_restarts,     ///< as anneal_cosine, r being the share of the running period: the first has
                       ///< `period` steps, each later one `ratio` times as many (an integer)
  inverse_square_root,  ///< max(to, from / sqrt(max(t - origin, 1)))
  step_decay,           ///< from * ratio^(t / period rounded down)
  milestone_decay,      ///< from * ratio^(entries of the table that are <= t; they never fall)
  table,                ///< the table's entry t; the last entry after the end
};

/// One piece of a schedule: active from clock `begin` until the next segment begins. All counts
/// are at most 2^53, so that they are exact in double. Fields that a curve does not name are
/// unused.
struct schedule_segment {
  schedule_curve curve = schedule_curve::constant;
  std::uint32_t table_count = 0;   ///< entries of the table, for the curves that read it
  std::uint64_t table_offset = 0;  ///< of the segment's first entry in the schedule's table
  std::uint64_t begin = 0;
  std::uint64_t period = 0;
  double multiplier = 1.0;  ///< of the curve's value
  double from = 0.0;
  double to = 0.0;
  double origin = 0.0;  ///< in local clocks; negative when the curve began before the segment
  double length = 1.0;
  double ratio = 1.0;

  bool operator==(const schedule_segment&) const = default;
};

static_assert(std::is_trivially_copyable_v<schedule_segment>);
static_assert(sizeof(schedule_segment) == 80, "a padding hole would have indeterminate bytes");

namespace math {

/// The local clock of `cosine_restarts` as a share of the period it lies in, in [0, 1).
STEPGRAPH_HOST_DEVICE double share_of_restarted_period(const schedule_segment& segment,
                                                       std::uint64_t local) {
  if (segment.ratio == 1.0) {
    return static_cast<double>(local % segment.period) / static_cast<double>(segment.period);
  }
  // Whole numbers below 2^53, hence exact; periods grow geometrically, hence few rounds.
  double elapsed = static_cast<double>(local);
  double period = static_cast<double>(segment.period);
  while (elapsed >= period) {
    elapsed -= period;
    period *= segment.ratio;
  }
  return elapsed / period;
}

/// The local clock of `cosine_wave`, folded into the first falling half of the wave, as a share of
/// that half. The fold is exact, so the wave does not drift.
STEPGRAPH_HOST_DEVICE double folded_share(const schedule_segment& segment, std::uint64_t local) {
  const std::uint64_t phase = local % (2 * segment.period);
  const std::uint64_t folded = phase > segment.period ? 2 * segment.period - phase : phase;
  return static_cast<double>(folded) / static_cast<double>(segment.period);
}

/// How many of the `count` milestones, which never fall, are at most `local`.
STEPGRAPH_HOST_DEVICE std::uint32_t milestones_passed(const double* milestones, std::uint32_t count,
                                                      std::uint64_t local) {
  const double now = static_cast<double>(local);
  std::uint32_t passed = 0;
  std::uint32_t unknown = count;  // entries from `passed` on that were not compared yet
  while (unknown > 0) {
    const std::uint32_t half = unknown / 2;
    if (milestones[passed + half] <= now) {
      passed += half + 1;
      unknown -= half + 1;
    } else {
      unknown = half;
    }
  }
  return passed;
}

/// to + c * (from - to)
STEPGRAPH_HOST_DEVICE double annealed(const schedule_segment& segment, double coefficient) {
  return segment.to + coefficient * (segment.from - segment.to);
}

// A cosine and a power are long inline code: each stands in one place, whatever needs it, since one
// thread runs this once a step and finds no instruction in the cache.

/// The curves made of half a cosine.
STEPGRAPH_HOST_DEVICE double cosine_curve_at(const schedule_segment& segment, std::uint64_t local,
                                             double x) {
  double ratio = 0.0;
  switch (segment.curve) {
    case schedule_curve::cosine_wave:
      ratio = folded_share(segment, local);
      break;
    case schedule_curve::cosine_restarts:
      ratio = share_of_restarted_period(segment, local);
      break;
    default:
      ratio = x / segment.length;
      break;
  }
  const bool rises = segment.curve == schedule_curve::rise_cosine;
  const double coefficient = 0.5 * (cosine_of_pi_times(rises ? 1.0 - ratio : ratio) + 1.0);
  return rises ? segment.from + coefficient * (segment.to - segment.from)
               : annealed(segment, coefficient);
}

/// The curves made of a power.
STEPGRAPH_HOST_DEVICE double power_curve_at(const schedule_segment& segment, const double* table,
                                            std::uint64_t local, double x) {
  double base = segment.ratio;
  double exponent = 0.0;
  switch (segment.curve) {
    case schedule_curve::anneal_exponential:
      base = 0.5;
      exponent = x / segment.length;
      break;
    case schedule_curve::anneal_polynomial:
      base = 1.0 - x / segment.length;
      exponent = segment.ratio;
      break;
    case schedule_curve::milestone_decay:
      exponent = static_cast<double>(
          milestones_passed(table + segment.table_offset, segment.table_count, local));
      break;
    default:
      exponent = static_cast<double>(local / segment.period);
      break;
  }
  const double value = power(base, exponent);
  switch (segment.curve) {
    case schedule_curve::anneal_exponential:
      return annealed(segment, 2.0 * value - 1.0);
    case schedule_curve::anneal_polynomial:
      return annealed(segment, value);
    default:
      return segment.from * value;
  }
}

/// The curve of a segment at a local clock, without the multiplier.
STEPGRAPH_HOST_DEVICE double curve_at(const schedule_segment& segment, const double* table,
                                      std::uint64_t local) {
  const double run = static_cast<double>(local) - segment.origin;
  const double begun = run > 0.0 ? run : 0.0;
  const double x = begun < segment.length ? begun : segment.length;
  switch (segment.curve) {
    case schedule_curve::linear:
      return segment.from + ((segment.to - segment.from) * x) / segment.length;
    case schedule_curve::anneal_linear:
      return annealed(segment, 1.0 - x / segment.length);
    case schedule_curve::anneal_minus_sqrt:
      return annealed(segment, 1.0 - square_root(x / segment.length));
    case schedule_curve::rise_cosine:
    case schedule_curve::anneal_cosine:
    case schedule_curve::cosine_wave:
    case schedule_curve::cosine_restarts:
      return cosine_curve_at(segment, local, x);
    case schedule_curve::anneal_exponential:
    case schedule_curve::anneal_polynomial:
    case schedule_curve::step_decay:
    case schedule_curve::milestone_decay:
      return power_curve_at(segment, table, local, x);
    case schedule_curve::inverse_square_root: {
      const double value = segment.from / square_root(run > 1.0 ? run : 1.0);
      return value > segment.to ? value : segment.to;
    }
    case schedule_curve::table: {
      const std::uint64_t last = segment.table_count - 1;
      return table[segment.table_offset + (local < last ? local : last)];
    }
    default:
      return segment.from;
  }
}

/// The value of a schedule at `clock`, in double: the same bits on host and device.
///
/// `segments` holds `count` > 0 segments, the first of which begins at 0 and each later one after
/// the one before; `table` is the schedule's table, which may be null if no segment reads it.
STEPGRAPH_HOST_DEVICE double value_at(const schedule_segment* segments, std::uint32_t count,
                                      const double* table, std::uint64_t clock) {
  std::uint32_t active = 0;
  std::uint32_t past = count;  // the active segment lies in [active, past)
  while (past - active > 1) {
    const std::uint32_t middle = active + (past - active) / 2;
    if (segments[middle].begin <= clock) {
      active = middle;
    } else {
      past = middle;
    }
  }
  const schedule_segment& segment = segments[active];
  return segment.multiplier * curve_at(segment, table, clock - segment.begin);
}

}  // namespace math
}  // namespace stepgraph
