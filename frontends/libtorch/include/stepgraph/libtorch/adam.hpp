#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "stepgraph/executor.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::libtorch {

namespace detail {
class step_engine;
}

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
  /// Computed on the device once a step from the group's step count. `lr` is then not used, except
  /// that an `lr` assigned after the first step (by an LRScheduler, say) holds over the schedule
  /// until `Adam::resume_schedule`.
  TORCH_ARG(std::optional<learning_rate_schedule>, schedule) = std::nullopt;
  /// Keep an f32 master of every f16 and bf16 parameter: the update works on the master and the
  /// parameter is its rounded copy, which is only written. f32 parameters need none.
  TORCH_ARG(bool, master_weights) = false;

 public:
  /// Also writes the fields that torch::optim::Adam and AdamW expect.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  /// Fields that the archive lacks keep their value, so options saved by torch::optim::Adam and
  /// AdamW can be read. Throws usage_error for options saved with `amsgrad`.
  void serialize(torch::serialize::InputArchive& archive) override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { lr_ = lr; }
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

/// Options of the step as a whole.
struct StepOptions {
  /// Leave parameters, state and step counts untouched when a gradient is not finite.
  TORCH_ARG(bool, skip_non_finite) = false;
  /// Clip the global L2 norm of the gradient; 0: no clipping.
  TORCH_ARG(double, max_grad_norm) = 0.0;
  /// Gradients arrive multiplied by this; the step divides by it.
  TORCH_ARG(double, loss_scale) = 1.0;
  /// The step stores zeros into the gradients it has read, which saves `zero_grad`.
  TORCH_ARG(bool, zero_gradients) = false;
  /// The step of CUDA parameters will be captured by the caller (see Adam). Eager steps then are
  /// kernel launches instead of a graph launch. No effect on the CPU.
  TORCH_ARG(bool, capturable) = false;
  /// Names of the parameters for messages, in order through all groups. May be shorter than the
  /// list of parameters; the others are called "group 0 parameter 3".
  TORCH_ARG(std::vector<std::string>, names) = {};
};

/// Adam and AdamW over CPU or CUDA tensors, run by stepgraph's executors.
///
///   stepgraph::libtorch::Adam optimizer(model->parameters(),
///                                       stepgraph::libtorch::AdamOptions(3e-4).weight_decay(0.1));
///   optimizer.zero_grad();
///   loss.backward();
///   optimizer.step();
///
/// Where the step runs. All parameters live on one device, and the first step (or `prepare`)
/// decides for the life of the optimizer:
///   CPU parameters                 the host executor
///   CUDA parameters                a CUDA graph captured once, replayed with one launch a step on
///                                  torch's current stream
///   CUDA parameters, capturable    kernels on torch's current stream. Set
///                                  `StepOptions::capturable(true)` to record the step into a
///                                  capture of yours (torch's CUDA graphs, cudaStreamBeginCapture);
///                                  an optimizer whose first step happens inside a capture is
///                                  capturable without saying so
/// One executor owns the step counts, so an optimizer that runs a graph of its own refuses to step
/// on a stream that is being captured, and says what to do.
///
/// Steps inside a capture. A captured step reads everything that changes from the memory of the
/// optimizer, which must outlive the graph:
///   * Replays see options assigned, a loaded checkpoint and settings only after `deliver`; eager
///     steps deliver by themselves. `load` calls it.
///   * Addresses are fixed once a step was captured: a moved gradient or parameter, an added group
///     and changed formats throw usage_error, since replays would go on using the old ones. When
///     the graphs will never be replayed again, `abandon_captured_steps` lifts this.
///   * The first step inside a capture uses the gradients that exist at that point of the capture,
///     also when eager steps before it used others.
///   * The optimizer does not see replays: order eager steps and `deliver` after them, by calling
///     them on the stream of the replays or by events.
///   * `prepare` (or an eager step) is required before the capture when master weights must be
///     created, and allowed always.
///
/// Gradients. Every parameter needs a dense gradient of type f32, f16 or bf16 at every step: step
/// counts belong to groups, so a parameter cannot sit out a step. A missing gradient throws
/// usage_error naming the parameter and never falls back to an earlier one; leave frozen
/// parameters out. Gradients and parameters that moved to other memory are re-bound (counted by
/// `rebinds`) without capturing again. The optimizer holds a reference to the memory of every
/// parameter, gradient and state until it has been replaced, so with `zero_grad(true)` two sets of
/// gradients can be alive; the default keeps the addresses and avoids both.
/// Tensors need not be contiguous, but dense, and a gradient must have its parameter's strides.
///
/// Groups. Adding a group, or parameters in a new group, builds the step anew at the next step with
/// all states and counts kept; the new group starts at step 0. Parameters cannot join a group that
/// has stepped. State of parameters that are in no group any more is dropped then.
///
/// Errors: stepgraph::usage_error for everything above and refused options; step() then has run
/// nothing and works again once the cause is gone. Not thread-safe, as torch's optimizers.
class Adam : public torch::optim::Optimizer {
 public:
  /// Groups without options get `defaults`; options of another type are refused.
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                AdamOptions defaults = {}, StepOptions step_options = {});
  explicit Adam(std::vector<torch::Tensor> params, AdamOptions defaults = {},
                StepOptions step_options = {});
  ~Adam() override;
  Adam(Adam&&) noexcept;
  Adam& operator=(Adam&&) noexcept;

  /// Runs the closure, if any, with gradients enabled, then one step. Returns the closure's result.
  /// CUDA: enqueued on torch's current stream of the parameters' device, never waits for it.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Zeroes the gradients in place and keeps their addresses, or drops them. Not virtual in torch:
  /// through an `Optimizer&` torch's own runs, which drops them by default.
  void zero_grad(bool set_to_none = false);

  /// Builds the step as the first `step` would: states, executor, captured graph. Runs none.
  /// Needs the gradients. Does nothing when there is nothing to build.
  void prepare();

  /// Enqueues the delivery of everything assigned since the last step, for replays of a captured
  /// step that are enqueued later on torch's current stream. Does nothing for an optimizer that is
  /// not capturable. Refused while the current stream is being captured.
  void deliver();

  /// Promises that no graph with a captured step of this optimizer runs or will be replayed.
  void abandon_captured_steps();

  /// Gives the group's learning rate back to its schedule after an `lr` assigned by hand. Refused
  /// for a group without schedule.
  void resume_schedule(std::size_t group);

  /// From the next step on.
  void set_loss_scale(double value);
  /// From the next step on. Builds the step anew if it did not measure the norm before.
  void set_max_grad_norm(double value);

  /// Step counts, learning rates, norm and skips after all steps so far; also stores the counts
  /// into the parameters' states. CUDA: waits for the device. Refused while capturing.
  step_status status();

  /// The plan of the step. Throws usage_error before the first step or `prepare`.
  const step_plan& plan() const;

  /// How often the step was built: 1 after the first step, more when something changed that needs
  /// another plan.
  std::uint64_t captures() const noexcept;
  /// How many operands (gradients or parameters) were re-bound to other memory.
  std::uint64_t rebinds() const noexcept;

  /// The states by TensorImpl. Asking for the mutable map makes the next step check every state
  /// tensor, so states may be assigned; not through a reference kept from earlier.
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& state();
  const ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>& state()
      const noexcept;

  /// Writes the states with their step counts, the options of the groups, the step counts of the
  /// groups (empty ones too), loss scale and max_grad_norm; what torch::optim::Adam and AdamW
  /// write is a part of it, so they can load it. CUDA: waits for the device.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Restores what `save` wrote, or a checkpoint of torch::optim::Adam or AdamW, on whatever device
  /// it was saved. Live state tensors are overwritten in place, so a captured step stays valid. A
  /// checkpoint without masters sets them to the parameters: load the model first. Parameters are
  /// matched by group and position. Throws usage_error, and changes nothing, when groups or sizes
  /// do not agree or the parameters of a group are at different steps.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::unique_ptr<detail::step_engine> engine_;
};

}  // namespace stepgraph::libtorch
