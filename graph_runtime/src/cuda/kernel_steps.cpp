#include "kernel_steps.hpp"

#include <fmt/format.h>

#include "../foreign_callbacks.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::cuda {
namespace {

/// Calls of this thread that a capture in progress forbids are legal while it lives.
class relaxed_capture_mode {
 public:
  relaxed_capture_mode() { STEPGRAPH_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~relaxed_capture_mode() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  relaxed_capture_mode(const relaxed_capture_mode&) = delete;
  relaxed_capture_mode& operator=(const relaxed_capture_mode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void enqueue_nodes(device_step& step, const step_plan& plan,
                   const std::vector<foreign_callback>& foreign, detail::pending_changes& pending,
                   const device_step::delivery& delivery, cudaStream_t stream) {
  for (std::size_t node = 0; node < plan.nodes.size(); ++node) {
    try {
      if (foreign[node]) {
        call_foreign_work(plan.nodes[node], foreign[node], step.context_on(stream));
      } else {
        step.enqueue(node, delivery.settings, step.order_of(node), stream);
      }
    } catch (...) {
      // Nothing that would have read the settings was enqueued.
      if (node <= step.settings_node()) step.not_delivered(pending);
      throw;
    }
    if (node == step.settings_node()) step.delivered(delivery, stream);
  }
}

/// Enqueues what is pending onto a stream that is not being captured and has followed.
void enqueue_delivery(device_step& step, detail::pending_changes& pending, cudaStream_t stream) {
  const device_step::delivery delivery = step.take(pending, stream, [] {});
  if (delivery.settings.serial == 0) return;
  const cudaError_t status = launch_apply_settings(step.block(), delivery.settings, stream);
  if (status != cudaSuccess) step.not_delivered(pending);
  STEPGRAPH_CUDA_CHECK(status);
  step.delivered(delivery, stream);
}

/// Calls `enqueue`, which puts work onto `stream`, between what came before and what comes after.
template <class Enqueue>
void enqueue_in_order(launch_trail& trail, cudaStream_t stream, Enqueue&& enqueue) {
  trail.follow(stream);
  try {
    enqueue();
  } catch (...) {
    trail.add_unknown(stream);  // without another call that may fail
    throw;
  }
  trail.record(stream);
}

}  // namespace

std::vector<foreign_callback> callbacks_on_streams(const step_plan& plan,
                                                   const foreign_work& foreign) {
  for (const plan_node& node : plan.nodes) {
    if (!node.only_if_applied) continue;
    throw usage_error(
        fmt::format("foreign work '{}': whether the step is applied is not known on the host, so "
                    "only_if_applied takes a graph_executor and its launches",
                    node.name));
  }
  return detail::callbacks_by_node(plan, foreign);
}

void enqueue_step(device_step& step, const step_plan& plan,
                  const std::vector<foreign_callback>& foreign, detail::pending_changes& pending,
                  cudaStream_t stream, bool capturing) {
  if (capturing) return enqueue_nodes(step, plan, foreign, pending, {}, stream);
  enqueue_in_order(step.trail(), stream, [&] {
    device_step::delivery delivery;
    if (pending.any()) delivery = step.take(pending, stream, [] {});
    enqueue_nodes(step, plan, foreign, pending, delivery, stream);
  });
}

void deliver(device_step& step, detail::pending_changes& pending, cudaStream_t stream) {
  if (is_capturing(stream)) {
    throw capture_error(
        "values cannot be delivered on a stream that is being captured: every "
        "replay would repeat them");
  }
  if (!pending.any()) return;
  enqueue_in_order(step.trail(), stream, [&] { enqueue_delivery(step, pending, stream); });
}

void deliver_beside_capture(device_step& step, detail::pending_changes& pending) {
  if (!pending.any()) return;
  // The stream of the replay may be the one that is being captured, where an event would be
  // captured too; and nothing may wait for a whole device that captures.
  if (step.trail().unrecorded()) {
    throw capture_error(
        "values cannot be delivered beside a capture after a launch whose end was not recorded: "
        "expected an executor with graph_options::record_launches, or a delivery before the "
        "capture");
  }
  const relaxed_capture_mode relaxed;
  const cudaStream_t stream = step.side_stream();
  enqueue_in_order(step.trail(), stream, [&] { enqueue_delivery(step, pending, stream); });
  STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream));
  step.trail().finished();
}

}  // namespace stepgraph::cuda
