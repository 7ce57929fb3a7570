#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "stepgraph/schedule.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::libtorch {

/// Options of one parameter group. Every one of them may be assigned between steps; the next step
/// uses the new value. `lr`, `betas`, `eps` and `weight_decay` reach a captured step without
/// capturing it again; changing any other one builds the step anew (counted by `Adam::captures`).
struct AdamOptions : public torch::optim::OptimizerCloneableOptions<AdamOptions> {
  AdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit, as torch's

  TORCH_ARG(double, lr) = 1e-3;
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0.0;
  /// `decoupled` is torch's AdamW, `l2` torch's Adam.
  TORCH_ARG(weight_decay_mode, mode) = weight_decay_mode::decoupled;
  TORCH_ARG(bool, bias_correction) = true;
  TORCH_ARG(bool, maximize) = false;
  /// The learning rate, computed on the device once a step, from the updates applied to the group
  /// or the samples consumed. `lr` is then not used, except that an `lr` assigned after the first
  /// step (by an LRScheduler, say) holds over the schedule until `Adam::resume_schedule`. Compared
  /// at every step with what the step was built for, which for a long table is not free.
  TORCH_ARG(std::optional<stepgraph::schedule>, schedule) = std::nullopt;
  /// The weight decay, likewise, over `weight_decay`; see `Adam::resume_weight_decay_schedule`.
  TORCH_ARG(std::optional<stepgraph::schedule>, weight_decay_schedule) = std::nullopt;
  /// The learning rate as a tensor: one float32 on the parameters' device, which every step reads,
  /// instead of `lr` and `schedule`. What is written into it in place, in stream order, reaches the
  /// next step and the next replay. Another tensor, or other memory, builds the step anew. Never
  /// saved; loading a checkpoint writes the saved learning rate into it.
  TORCH_ARG(torch::Tensor, lr_tensor);
  /// Keep an f32 master of every f16 and bf16 parameter: the update works on the master and the
  /// parameter is its rounded copy, which is only written. f32 parameters need none.
  TORCH_ARG(bool, master_weights) = false;

 public:
  /// Also writes the fields that torch::optim::Adam and AdamW expect. With an `lr_tensor` the
  /// learning rate is its value, and CUDA: waits for it.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  /// Fields that the archive lacks keep their value, so options saved by torch::optim::Adam and
  /// AdamW can be read. Throws usage_error for options saved with `amsgrad` and for a schedule that
  /// cannot be evaluated.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// What torch's learning-rate schedulers read and write: of the `lr_tensor`, if there is one (on
  /// CUDA reading waits for it), else `lr`.
  double get_lr() const override;
  void set_lr(double lr) override;
  /// Tensors are compared by identity.
  friend bool operator==(const AdamOptions& lhs, const AdamOptions& rhs);
};

/// State of one parameter. The tensors are f32, of the parameter's sizes and on its device; the
/// step updates them in place, and they keep their addresses from the first step on.
struct AdamParamState : public torch::optim::OptimizerCloneableParamState<AdamParamState> {
  /// Updates applied, as of the latest `Adam::save`, `load`, `status` or building of the step: the
  /// live count is in the memory of the executor.
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, exp_avg);
  TORCH_ARG(torch::Tensor, exp_avg_sq);
  /// Undefined without master weights.
  TORCH_ARG(torch::Tensor, master);

 public:
  void serialize(torch::serialize::OutputArchive& archive) const override;
  void serialize(torch::serialize::InputArchive& archive) override;
};

}  // namespace stepgraph::libtorch
