#pragma once

#include <cstdint>

#include "stepgraph/math/elementary.hpp"

namespace stepgraph {

enum class schedule_shape : std::uint32_t {
  constant,  ///< the maximum, after the warm-up
  linear,    ///< straight line from maximum to minimum
  cosine,    ///< half a cosine from maximum to minimum
};

/// A learning-rate schedule with a linear warm-up, evaluated on the device once a step.
///
/// The clock n is the number of updates the group has applied before this step (0 at the first);
/// a skipped step does not advance it. With w = warmup_steps and D = decay_steps (which counts
/// from step 0 and includes the warm-up), tested in this order:
///   w > 0 and n <= w   initial + (maximum - initial) * n / w
///   constant           maximum
///   n > D              minimum
///   otherwise          minimum + c * (maximum - minimum), r = (n - w) / (D - w),
///                      c = 1 - r (linear) or (1 + cos(pi * r)) / 2 (cosine)
/// The same conventions as Megatron-LM's OptimizerParamScheduler, in steps.
struct learning_rate_schedule {
  schedule_shape shape = schedule_shape::constant;
  std::uint32_t reserved = 0;  ///< keeps the layout free of padding; always 0
  double initial = 0.0;
  double maximum = 0.0;
  double minimum = 0.0;
  std::uint64_t warmup_steps = 0;
  std::uint64_t decay_steps = 0;
};

namespace math {

/// The learning rate after `completed` updates, in double.
STEPGRAPH_HOST_DEVICE double learning_rate_at(const learning_rate_schedule& schedule,
                                              std::uint64_t completed) {
  const double n = static_cast<double>(completed);
  const double warmup = static_cast<double>(schedule.warmup_steps);
  const double decay = static_cast<double>(schedule.decay_steps);
  if (schedule.warmup_steps > 0 && completed <= schedule.warmup_steps) {
    return schedule.initial + (schedule.maximum - schedule.initial) * n / warmup;
  }
  if (schedule.shape == schedule_shape::constant) return schedule.maximum;
  if (completed > schedule.decay_steps) return schedule.minimum;
  const double span = decay - warmup;
  const double ratio = span > 0.0 ? (n - warmup) / span : 1.0;
  const double coefficient = schedule.shape == schedule_shape::linear
                                 ? 1.0 - ratio
                                 : 0.5 * (cosine_of_pi_times(ratio) + 1.0);
  return schedule.minimum + coefficient * (schedule.maximum - schedule.minimum);
}

}  // namespace math
}  // namespace stepgraph
