#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "stepgraph/math/schedule.hpp"

namespace stepgraph {

/// What a schedule counts.
enum class schedule_clock : std::uint8_t {
  updates,  ///< updates applied to the group
  samples,  ///< samples consumed by the training
};

/// A learning rate or a weight decay as a function of its clock.
///
/// The clock shows how many updates were applied, or samples consumed, before the step in question:
/// 0 at the first step. A skipped step advances neither.
///
/// Made by the functions of namespace `schedules` (here, and in megatron_schedules.hpp and
/// torch_schedules.hpp), or by hand from segments, which `validate` then judges. A value: copied,
/// compared field by field, tied to no device.
struct schedule {
  std::vector<schedule_segment> segments;  ///< at least one; the first begins at 0, the rest later
  std::vector<double> table;               ///< what segments with entries read
  schedule_clock clock = schedule_clock::updates;

  bool operator==(const schedule&) const = default;
};

/// Throws usage_error, naming the segment and the field, unless the schedule can be evaluated at
/// every clock: segments in order, finite parameters of at least 0, curves that do not divide by
/// zero, entries inside the table. Counts above 2^53 are not exact in double and are refused too.
void validate(const schedule& checked);

/// The value at `clock`, bit for bit what the device computes. Throws usage_error if there are no
/// segments; `validate` finds what else may be wrong.
double value_at(const schedule& evaluated, std::uint64_t clock);

namespace schedules {

/// The default of a number that the caller has to give.
inline constexpr double required = std::numeric_limits<double>::quiet_NaN();

/// The same number always. Refuses one that is negative or not finite.
schedule constant(double value, schedule_clock clock = schedule_clock::updates);

/// values[n] at clock n, and the last value ever after: any function of the clock, for example
/// torch's LambdaLR, tabulated by the caller. Refuses an empty list and values that are negative or
/// not finite.
schedule table(std::vector<double> values, schedule_clock clock = schedule_clock::updates);

/// One schedule after the other, by the rule of torch.optim.lr_scheduler.SequentialLR: parts[0]
/// from clock 0, parts[i] from clock milestones[i - 1], each as if its own clock started there.
/// Refuses no parts, a number of milestones other than one fewer than the parts, milestones that do
/// not rise strictly from at least 1, and parts whose clocks differ.
schedule sequence(const std::vector<schedule>& parts, const std::vector<std::uint64_t>& milestones);

/// The schedule with every value multiplied by `multiplier`: a group's share of a common schedule
/// (Megatron-LM's wd_mult), or a base learning rate times a table of factors. Refuses a multiplier
/// that is negative or not finite.
schedule scaled(schedule unscaled, double multiplier);

}  // namespace schedules
}  // namespace stepgraph
