#pragma once

#include <cuda_runtime_api.h>

#include "stepgraph/kernels/step_block.hpp"

/// Launchers of the operations of a step. All views are of device memory of the current device
/// (settings entries may be pinned host memory). Each call enqueues exactly one kernel onto
/// `stream`, never blocks, allocates nothing, is legal under stream capture and returns the
/// launch's status. Kernels launched one after the other onto one stream overlap their prologues
/// by programmatic dependent launch where the device supports it.
///
/// The step's record is written by whichever launch gets a view that names a ring: the one that
/// advances the step, or an update after it, where writing over the bus takes no time of its own.
namespace stepgraph::cuda {

/// Whether a kernel may start before its predecessor in the stream has finished. Only for a
/// predecessor that is a kernel of the same step.
enum class launch_order { full, programmatic };

/// What one block of a launch tells another, as tagged words: up to three, so that a reader needs
/// neither counters nor fences. Before the first launch their tag is that of an earlier one.
struct alignas(32) block_message {
  std::uint64_t words[4] = {};
};

/// One pass over all gradients; a block of its own adds up what the others found and advances the
/// step. `messages` holds statistics_blocks(chunk_count) + prepare_blocks(group_count) - 1
/// elements.
cudaError_t launch_grad_stats(const statistics_table_view& table, const statistics_options& options,
                              block_message* messages, const step_block_view& block,
                              const settings_batch& settings, launch_order order,
                              cudaStream_t stream);

/// The same pass without the advance: leaves the totals of all norm groups, one f64 each, and then
/// the number of zeros in `totals`, for `launch_advance_step`. What is summed over devices (or, of
/// an infinity norm, taken the maximum of) in between is the whole gradient's.
cudaError_t launch_grad_totals(const statistics_table_view& table,
                               const statistics_options& options, block_message* messages,
                               const step_block_view& block, double* totals, launch_order order,
                               cudaStream_t stream);

/// Applies the settings and advances the step by what `totals` holds (null: nothing was measured).
/// `messages` holds prepare_blocks(group_count) - 1 elements.
cudaError_t launch_advance_step(const step_block_view& block, const settings_batch& settings,
                                const double* totals, block_message* messages, launch_order order,
                                cudaStream_t stream);

/// Applies a batch of settings without advancing the step.
cudaError_t launch_apply_settings(const step_block_view& block, const settings_batch& settings,
                                  cudaStream_t stream);

/// Multiplies every gradient by the step's gradient scale (clip coefficient / loss scale), in
/// place; leaves them when the step is skipped. `chunk_count` must not be zero.
cudaError_t launch_scale_gradients(const statistics_table_view& table, const step_block_view& block,
                                   launch_order order, cudaStream_t stream);

/// Updates every chunk of the table, all of them of tensors of one signature. `chunk_count` must
/// not be zero.
cudaError_t launch_update(const update_signature& signature, const tensor_table_view& table,
                          const step_block_view& block, const update_options& options,
                          launch_order order, cudaStream_t stream);

/// Sets the condition of a conditional graph node: 1 if the step that has advanced is applied, 0 if
/// it is skipped. Only while `stream` is captured into the graph of the condition.
cudaError_t launch_set_condition(cudaGraphConditionalHandle condition, const step_block_view& block,
                                 cudaStream_t stream);

/// A loop of `steps` steps, its condition and the steps that are left: `launch_begin_loop` before
/// the conditional node, `launch_end_of_step` as the last of its body.
cudaError_t launch_begin_loop(cudaGraphConditionalHandle condition, std::uint32_t* left,
                              std::uint32_t steps, cudaStream_t stream);
cudaError_t launch_end_of_step(cudaGraphConditionalHandle condition, std::uint32_t* left,
                               cudaStream_t stream);

/// The argument that carries the settings in a captured `grad_stats`, `advance_step` or
/// `apply_settings` node: its position among the kernel's arguments, and their number.
inline constexpr int settings_argument_of_grad_stats = 3;
inline constexpr int arguments_of_grad_stats = 4;
inline constexpr int settings_argument_of_advance_step = 1;
inline constexpr int arguments_of_advance_step = 4;
inline constexpr int settings_argument_of_apply_settings = 1;
inline constexpr int arguments_of_apply_settings = 2;

/// Resources of the kernel that `launch_update` picks for a signature.
struct kernel_resources {
  int registers = 0;
  std::size_t local_bytes = 0;
  int threads_per_block = 0;
  int max_blocks_per_multiprocessor = 0;
};
cudaError_t update_kernel_resources(const update_signature& signature, kernel_resources* result);

}  // namespace stepgraph::cuda
