#pragma once

#include <cstdint>
#include <type_traits>

#include "stepgraph/math/schedule.hpp"

namespace stepgraph {

/// How the update of a group is meant; bits of `group_settings::flags`.
enum group_flags : std::uint32_t {
  group_decoupled_weight_decay = 1u << 0,  ///< AdamW; otherwise weight decay joins the gradient
  group_bias_correction = 1u << 1,
  group_maximize = 1u << 2,
  group_learning_rate_by_hand = 1u << 3,  ///< `learning_rate` holds until the schedule resumes
};

/// The hyperparameters of one group, resident beside the state. Changed only by the step itself,
/// from settings that the host published (`setting`).
struct group_settings {
  double learning_rate = 1e-3;  ///< used when no schedule runs or a value was set by hand
  double weight_decay = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  std::uint32_t flags = group_decoupled_weight_decay | group_bias_correction;
  std::uint32_t has_schedule = 0;
  learning_rate_schedule schedule;
};

/// What moves in one group from step to step.
struct group_progress {
  std::uint64_t step = 0;      ///< updates applied so far
  double learning_rate = 0.0;  ///< of the latest applied update
};

/// Hyperparameters of the step as a whole.
struct step_settings {
  double loss_scale = 1.0;     ///< gradients are divided by it inside the update
  double max_grad_norm = 0.0;  ///< 0: no clipping
};

/// The scalars of the step, written once a step by `advance_step` and read by every other kernel.
///
/// Step and skip lie in the first 16 bytes, which every block of an update reads in one access.
struct alignas(16) step_scalars {
  std::uint64_t step = 0;             ///< steps applied
  std::uint32_t skip = 0;             ///< this step leaves parameters and state untouched
  std::uint32_t found_inf = 0;        ///< a gradient of this step held an infinity or a NaN
  std::uint64_t skipped = 0;          ///< steps skipped
  std::uint64_t settings_serial = 0;  ///< the last batch of settings that was applied
  double grad_norm = 0.0;             ///< global L2 norm of the unscaled gradient: 0 when not
                                      ///< measured, infinity when it is not finite
  float loss_scale = 1.0f;
  float inverse_scale = 1.0f;
  float clip_coefficient = 1.0f;
  std::uint32_t reserved[3] = {};
};

/// Names a hyperparameter in a `setting`.
enum class setting_field : std::uint32_t {
  learning_rate,    ///< also holds the schedule until `resume_schedule`
  resume_schedule,  ///< gives the learning rate back to the schedule
  weight_decay,
  beta1,
  beta2,
  eps,
  group_step,     ///< updates applied so far, to resume from a checkpoint
  loss_scale,     ///< of the step
  max_grad_norm,  ///< of the step
  step,           ///< of the step
};

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
  double sum_of_squares = 0.0;  ///< of the gradients as stored, before unscaling
  std::uint32_t non_finite = 0;
  std::uint32_t measured = 0;  ///< 0: no grad_stats node ran
};

static_assert(std::is_trivially_copyable_v<group_settings>);
static_assert(std::is_trivially_copyable_v<step_scalars>);

}  // namespace stepgraph
