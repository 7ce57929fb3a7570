#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "../pending_changes.hpp"
#include "device_step.hpp"
#include "foreign_call.hpp"
#include "stepgraph/step_plan.hpp"

// Steps as kernels on streams of the caller's, and deliveries without a step: what the CUDA
// executors have in common. All need the step's device to be current.
namespace stepgraph::cuda {

/// The callbacks of a plan whose step needs no branch on the device. Throws usage_error for others
/// and for callbacks that are not those of the plan.
std::vector<foreign_callback> callbacks_on_streams(const step_plan& plan,
                                                   const foreign_work& foreign);

/// Enqueues one step onto `stream`, ordered after what was enqueued before. Delivers what is
/// pending unless `capturing`, that is, unless the stream is being captured; then neither order nor
/// delivery is possible. Foreign work is called in its place.
void enqueue_step(device_step& step, const step_plan& plan,
                  const std::vector<foreign_callback>& foreign, detail::pending_changes& pending,
                  cudaStream_t stream, bool capturing);

/// Enqueues what is pending, without a step. Throws capture_error on a stream that is being
/// captured.
void deliver(device_step& step, detail::pending_changes& pending, cudaStream_t stream);

/// The same on a stream of its own, and waits for it. Legal while streams are being captured.
/// Throws capture_error if it cannot be ordered after a replay.
void deliver_beside_capture(device_step& step, detail::pending_changes& pending);

}  // namespace stepgraph::cuda
