#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <string>

namespace stepgraph {

/// What foreign work is called with. A callback that needs the stream alone may take a cudaStream_t
/// instead.
struct foreign_context {
  /// Where its work belongs: the next node of the step runs after everything on this stream. Not
  /// always the stream of the launch.
  cudaStream_t stream = nullptr;
  /// Device memory, one f64 for each norm group and one for the zeros: what work after the node
  /// `grad_stats` of a plan with exchange_totals combines over devices.
  double* totals = nullptr;
  /// One f32 in device memory: the loss scale that the next step expects in its gradients.
  const float* loss_scale = nullptr;

  operator cudaStream_t() const noexcept { return stream; }
};

/// What a plan's foreign work is on a device, by the names of its nodes:
///
///   {{"all_reduce", [&](cudaStream_t stream) { reduce(gradients, stream); }}}
///
/// A callback enqueues onto the stream, or nothing, and must not wait for it. It may fork to
/// streams of its own by events and has to join them before it returns. A first kernel that is
/// launched programmatically has to wait for its predecessors by itself.
///
/// `stream_executor` calls it at every launch, and `graph_executor` at every `enqueue`. For its own
/// graph, `graph_executor` calls it while it captures, in the thread that builds the executor, work
/// for conditional bodies before all other, and a launch repeats what was enqueued: memory, streams
/// and communicators that captured work uses must outlive the launches, and may be destroyed before
/// or after a `release`. The executor keeps copies of the callbacks and destroys them after its
/// graph, when its launches have finished.
///
/// What a callback throws passes through the executor unchanged. A callback that returns after a
/// call that is not allowed under capture gives a capture_error with its name.
using foreign_work = std::map<std::string, std::function<void(const foreign_context&)>>;

}  // namespace stepgraph
