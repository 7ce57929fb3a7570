#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "stepgraph/executor.hpp"
#include "stepgraph/libtorch/adam_options.hpp"
#include "stepgraph/libtorch/step_options.hpp"
#include "stepgraph/step_plan.hpp"
#include "stepgraph/step_record.hpp"

namespace stepgraph::libtorch {

namespace detail {
class step_engine;
}

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
/// Loss scaling. The scale and its counters live where the step runs and follow its rule there;
/// nothing reads them on the host:
///
///   (loss * optimizer.loss_scale_tensor()).backward();
///   optimizer.step();  // divides by the scale, skips on overflow, moves the scale
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
  /// Likewise for the weight decay.
  void resume_weight_decay_schedule(std::size_t group);

  /// From the next step on; the counters of its rule stay. Refused with a loss_scale_input.
  void set_loss_scale(double value);
  /// From the next step on. Builds the step anew if it did not measure the norm before.
  void set_max_grad_norm(double value);
  /// Likewise.
  void set_skip_above_norm(double value);
  /// From the next step on.
  void set_samples_per_step(std::uint64_t samples);

  /// The loss scale that the next step expects in its gradients: one float32, no dimensions, on the
  /// parameters' device, to multiply the loss by. Reading it is ordered like any other use of a
  /// tensor on the stream of the steps; the host is not asked. To be read only.
  ///
  /// It is the memory of the step itself, which changes in place, so ask for it at every step
  /// (that costs nothing): before the first step, after `set_loss_scale` or `load`, and when the
  /// step was built anew, it is another tensor. One that was kept stays readable, with the scale it
  /// had. While capturing, the step must be built and everything assigned delivered
  /// (usage_error), since a replay would repeat the number of today.
  torch::Tensor loss_scale_tensor();

  /// Records of the steps that have finished since the last call, oldest first. Waits for nothing;
  /// empty unless `StepOptions::record_capacity` is set. `launch` counts through the life of the
  /// optimizer.
  record_batch records();

  /// Step counts, learning rates, norm, loss scale and skips after all steps so far; also stores
  /// the counts into the parameters' states. CUDA: waits for the device. Refused while capturing.
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

  /// Writes the states with their step counts, the options of the groups with their schedules, the
  /// step counts of the groups (empty ones too), steps, skips, samples, the loss scale with its
  /// counters, max_grad_norm and skip_above_norm; what torch::optim::Adam and AdamW write is a part
  /// of it, so they can load it. Right after a skipped step it holds what the step left, no more.
  /// CUDA: waits for the device.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Restores what `save` wrote, or a checkpoint of torch::optim::Adam or AdamW, on whatever device
  /// it was saved. Live state tensors are overwritten in place, so a captured step stays valid. A
  /// checkpoint without masters sets them to the parameters: load the model first. Parameters are
  /// matched by group and position. The other options of the step are this optimizer's own; under
  /// another rule of loss scaling than the checkpoint's, the counters of the rule start afresh.
  /// Throws usage_error, and changes nothing, when groups or sizes do not agree or the parameters
  /// of a group are at different steps.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::unique_ptr<detail::step_engine> engine_;
};

}  // namespace stepgraph::libtorch
