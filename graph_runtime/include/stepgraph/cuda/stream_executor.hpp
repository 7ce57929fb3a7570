#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "stepgraph/cuda/foreign_work.hpp"
#include "stepgraph/executor.hpp"

namespace stepgraph {

namespace cuda {
class device_step;
}

/// Runs a plan as kernels on a stream of the caller's, eagerly or inside the caller's capture.
class stream_executor final : public executor {
 public:
  /// Allocates the step's scalars and tables on the device of the plan's tensors and copies them
  /// there, in the order of `stream`. Refuses a plan of shapes alone, tensors that are not memory
  /// of that device, a stream that is being captured, callbacks that are not those of the plan's
  /// foreign work, and foreign work with only_if_applied, which takes a `graph_executor`.
  stream_executor(step_plan plan, cudaStream_t stream, foreign_work foreign = {});
  /// Waits for the device, so that the tensors may be freed next. Graphs that captured a launch
  /// must not be replayed any more. Not to be destroyed while a stream of the same thread is being
  /// captured.
  ~stream_executor() override;
  stream_executor(stream_executor&&) noexcept;
  stream_executor& operator=(stream_executor&&) noexcept;

  /// Enqueues one step onto `stream`, ordered after the launch or delivery before, whatever its
  /// stream. Never blocks. Legal while `stream` is being captured: the captured kernels read
  /// everything that changes from device memory. Values set and operands re-bound since the last
  /// launch are delivered first when the stream is not being captured; a launch into a capture
  /// leaves them pending (see `deliver_async`), so that no replay repeats them, and its replays are
  /// the caller's to order.
  ///
  /// Foreign work is called in its place. What it throws passes on: the nodes before it have been
  /// enqueued, those after it have not, and values set stay pending unless the node that advances
  /// the step was enqueued. Throws capture_error, with its name, if it invalidates the capture.
  void launch(cudaStream_t stream);

  /// Enqueues the delivery of values set and operands re-bound since the last launch or delivery,
  /// ordered after that: replays of a captured launch that are enqueued later see them. Refused on
  /// a stream that is being captured (capture_error), and while the ledger knows of a stale operand
  /// (usage_error).
  void deliver_async(cudaStream_t stream);

  /// Delivers on a stream of its own, ordered after the launches and deliveries made outside
  /// captures, and waits for it. Legal while streams of the calling thread are being captured: so a
  /// step that is captured next runs with what was set and re-bound until now.
  void deliver_beside_capture();

  /// Goes on with another plan, with the same rules for what is carried over as
  /// `graph_executor::update`. Values and addresses alone become pending, and launches captured
  /// before stay good: they see them after a delivery. Anything else waits for the device and
  /// rebuilds the step's memory (`rebuilt` in the report): graphs that captured a launch before
  /// must not be replayed any more, which `recapture_required` says until a launch is captured
  /// again. No path is dearer than `table_write` here. Throws what the constructor throws; then,
  /// and after any other error, everything is as it was.
  /// Foreign work goes on with the callbacks of before or, where they are given, with `foreign`,
  /// which counts as another step.
  update_report update(step_plan next, cudaStream_t stream,
                       std::optional<foreign_work> foreign = {});

  /// Waits for the device.
  step_status status() override;

  /// One f32 in device memory: the loss scale that the next step expects in its gradients. A loss
  /// that is multiplied by it on the device, after the step before, needs no host read.
  const float* loss_scale_address() const noexcept;
  /// Device memory, one f64 for each norm group and one for the zeros: what foreign work after the
  /// node `grad_stats` of a plan with exchange_totals combines over devices.
  double* totals_address() const noexcept;

 private:
  void check_memory(const void* data, const std::string& tensor,
                    operand_kind operand) const override;
  void check_inputs(const step_plan& plan) const override;
  device_location device() const override;

  /// Destroyed in the reverse order: the device has finished when the callbacks go.
  std::vector<std::function<void(const foreign_context&)>> foreign_;  ///< of each node
  std::unique_ptr<cuda::device_step> step_;
};

}  // namespace stepgraph
