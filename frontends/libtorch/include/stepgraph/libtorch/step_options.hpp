#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "stepgraph/step_plan.hpp"

namespace stepgraph::libtorch {

/// Options of the step as a whole.
///
/// A skipped step leaves parameters, state and step counts as they are; only the loss scale and its
/// counters move.
struct StepOptions {
  /// Skip the step when a gradient is not finite.
  TORCH_ARG(bool, skip_non_finite) = false;
  /// Clip the global norm of the gradient; 0: no clipping. Implies skip_non_finite.
  TORCH_ARG(double, max_grad_norm) = 0.0;
  /// Skip the step when the norm is above this; 0: never.
  TORCH_ARG(double, skip_above_norm) = 0.0;
  /// The norm that clips, skips and is reported.
  TORCH_ARG(norm_kind, norm) = norm_kind::l2;
  /// Measure the norm even if nothing depends on it.
  TORCH_ARG(bool, measure_norm) = false;
  /// Count the gradient elements that are zero.
  TORCH_ARG(bool, count_zeros) = false;
  /// Gradients arrive multiplied by this; the step divides by it. With a scaling rule: the first
  /// scale.
  TORCH_ARG(double, loss_scale) = 1.0;
  /// How the loss scale changes, with the numbers of its rule: `loss_scaling{.rule = torch_amp}`
  /// has those of torch.amp, `megatron_loss_scaling()` Megatron-LM's. A rule implies
  /// skip_non_finite. The scale lives on the device: multiply the loss by `loss_scale_tensor`.
  TORCH_ARG(loss_scaling, scaling) = {};
  /// The step stores zeros into the gradients it has read, which saves `zero_grad`.
  TORCH_ARG(bool, zero_gradients) = false;
  /// The step leaves the gradients divided by the loss scale and clipped, unless it is skipped.
  TORCH_ARG(bool, unscale_gradients) = false;
  /// One float32 on the parameters' device that every step reads: anything but zero, NaN too, skips
  /// the step. The optimizer keeps it alive; whoever writes it does so in place and in stream
  /// order.
  TORCH_ARG(torch::Tensor, found_inf);
  /// Likewise, the loss scale of the step, instead of loss_scale. Needs the rule `fixed`: whoever
  /// writes the tensor owns the scale.
  TORCH_ARG(torch::Tensor, loss_scale_input);
  /// What an applied step adds to the samples consumed.
  TORCH_ARG(std::uint64_t, samples_per_step) = 0;
  /// Step records kept for `Adam::records`; 0: none are written.
  TORCH_ARG(std::uint32_t, record_capacity) = 0;
  /// The step of CUDA parameters will be captured by the caller (see Adam). Eager steps then are
  /// kernel launches instead of a graph launch. No effect on the CPU.
  TORCH_ARG(bool, capturable) = false;
  /// Names of the parameters for messages, in order through all groups. May be shorter than the
  /// list of parameters; the others are called "group 0 parameter 3".
  TORCH_ARG(std::vector<std::string>, names) = {};
};

}  // namespace stepgraph::libtorch
