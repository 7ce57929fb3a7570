#pragma once

#include <cstdint>
#include <type_traits>

#include "stepgraph/math/loss_scale.hpp"
#include "stepgraph/math/schedule.hpp"

namespace stepgraph {

/// How the update of a group is meant; bits of `group_settings::flags`.
enum group_flags : std::uint32_t {
  group_decoupled_weight_decay = 1u << 0,  ///< AdamW; otherwise weight decay joins the gradient
  group_bias_correction = 1u << 1,
  group_maximize = 1u << 2,
};

/// The schedules of all groups, one after the other.
struct schedule_tables {
  const schedule_segment* segments = nullptr;
  const double* table = nullptr;  ///< what segments with entries read
};

/// Where the schedule of one value of one group lies in the tables.
struct schedule_reference {
  std::uint32_t first = 0;
  std::uint32_t count = 0;           ///< of segments; 0: there is no schedule
  std::uint32_t counts_samples = 0;  ///< its clock: samples consumed; 0: updates of the group
  std::uint32_t held_by_hand = 0;    ///< a value set by hand holds until the schedule resumes
};

/// The hyperparameters of one group, resident beside the state. Changed only by the step itself,
/// from settings that the host published (`setting`).
///
/// Learning rate and weight decay come from the first of these that there is: the input, the value
/// set by hand, the schedule, the value the group was built with.
struct group_settings {
  double learning_rate = 1e-3;
  double weight_decay = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  std::uint32_t flags = group_decoupled_weight_decay | group_bias_correction;
  std::uint32_t reserved = 0;
  schedule_reference learning_rate_schedule;
  schedule_reference weight_decay_schedule;
  const float* learning_rate_input = nullptr;  ///< one f32 read at every step; null: none
  const float* weight_decay_input = nullptr;
};

/// What moves in one group from step to step.
struct group_progress {
  std::uint64_t step = 0;      ///< updates applied so far
  double learning_rate = 0.0;  ///< of the latest applied update
  double weight_decay = 0.0;   ///< of the latest applied update
};

/// Which norm of the gradient is measured.
enum class norm_kind : std::uint32_t {
  l2,        ///< square root of the sum of squares
  infinity,  ///< largest magnitude
};

/// Hyperparameters of the step as a whole.
struct step_settings {
  double max_grad_norm = 0.0;          ///< 0: no clipping
  double skip_above_norm = 0.0;        ///< a norm above it skips the step; 0: none does
  std::uint64_t samples_per_step = 0;  ///< what an applied step adds to the samples
  std::uint32_t skip_non_finite = 0;   ///< a gradient that is not finite skips the step
  norm_kind norm = norm_kind::l2;
  loss_scaling scaling;
  const float* found_inf_input = nullptr;   ///< anything but zero skips the step; null: none
  const float* loss_scale_input = nullptr;  ///< the scale of the gradients; null: the step's own
};

/// The scalars of the step, written once a step by `advance_step` and read by every other kernel.
///
/// Step and skip lie in the first 16 bytes, which every block of an update reads in one access.
struct alignas(16) step_scalars {
  std::uint64_t step = 0;       ///< steps applied
  std::uint32_t skip = 0;       ///< this step leaves parameters and state untouched
  std::uint32_t found_inf = 0;  ///< a gradient of this step was not finite, or the input says so
  std::uint64_t skipped = 0;    ///< steps skipped
  std::uint64_t launches = 0;   ///< of this executor, applied or skipped; nobody sets it
  std::uint64_t samples = 0;    ///< consumed by the applied steps
  std::uint64_t settings_serial = 0;  ///< the last batch of settings that was applied
  std::uint64_t zeros = 0;            ///< gradient elements equal to zero; 0 when not counted
  double grad_norm = 0.0;             ///< global norm of the unscaled gradient: 0 when not
                                      ///< measured, infinity when it is not finite
  float loss_scale = 1.0f;            ///< of this step
  float inverse_scale = 1.0f;
  float clip_coefficient = 1.0f;
  float gradient_scale = 1.0f;       ///< clip coefficient / loss scale
  loss_scale_state next_loss_scale;  ///< of the step after this one
  std::uint32_t reserved = 0;
};

/// Names a hyperparameter in a `setting`.
enum class setting_field : std::uint32_t {
  learning_rate,         ///< also holds the schedule until `resume_learning_rate`
  resume_learning_rate,  ///< gives the learning rate back to the schedule
  weight_decay,          ///< also holds the schedule until `resume_weight_decay`
  resume_weight_decay,   ///< gives the weight decay back to the schedule
  beta1,
  beta2,
  eps,
  group_step,  ///< updates applied so far, to resume from a checkpoint
  // Of the step as a whole:
  loss_scale,
  growth_tracker,
  hysteresis_left,
  max_grad_norm,
  skip_above_norm,
  samples_per_step,
  step,
  skipped,
  samples,
};
inline constexpr std::uint32_t setting_fields =
    static_cast<std::uint32_t>(setting_field::samples) + 1;

/// The `setting::group` of a hyperparameter of the whole step.
inline constexpr std::uint32_t whole_step = 0xffffffffu;

/// One value set by hand, on its way to the next launch.
struct setting {
  std::uint32_t group = whole_step;
  setting_field field = setting_field::learning_rate;
  double value = 0.0;
};

/// What `grad_stats` found; the input of `advance_step`.
struct gradient_statistics {
  /// Sum of squares, or largest magnitude, of the gradients as stored, before unscaling. Not finite
  /// exactly if a gradient is not.
  double total = 0.0;
  std::uint64_t zeros = 0;
  std::uint32_t measured = 0;  ///< 0: no grad_stats node ran
};

static_assert(std::is_trivially_copyable_v<group_settings>);
static_assert(std::is_trivially_copyable_v<step_scalars>);

}  // namespace stepgraph
