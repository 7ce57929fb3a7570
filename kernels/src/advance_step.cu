#include "advance_step_block.cuh"
#include "dependent_launch.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"
#include "stepgraph/kernels/launch_shape.hpp"

namespace stepgraph::cuda {
namespace {

constexpr int threads = advance_step_threads;
static_assert(threads == prepare_threads);

__global__ void __launch_bounds__(threads)
    advance_step_kernel(step_block_view block, const __grid_constant__ settings_batch settings,
                        const double* totals, block_message* messages) {
  __shared__ advance_memory memory;
  let_successors_start();
  wait_for_predecessors();
  if (blockIdx.x != 0) {
    prepare_groups_for_block_0(block, settings, messages, memory);
    return;
  }
  const advance_inputs inputs = prepare_step_in_block(block, settings, 0, memory);
  gradient_statistics statistics;
  if (totals != nullptr) {
    statistics.measured = 1;
    statistics.total = math::combined_total(totals, block.norm_group_count, inputs.settings.norm);
    statistics.zeros = static_cast<std::uint64_t>(totals[block.norm_group_count]);
  }
  finish_step_in_block(
      block, settings, statistics, [&](std::uint32_t i) { return totals[i]; }, inputs, messages,
      memory);
}

__global__ void __launch_bounds__(threads)
    apply_settings_kernel(step_block_view block, const __grid_constant__ settings_batch settings) {
  let_successors_start();
  wait_for_predecessors();
  std::uint64_t samples = 0;
  apply_settings_in_block(block, settings, 0, block.group_count, true, samples);
  // Every thread has read the serial.
  __syncthreads();
  if (threadIdx.x == 0 && settings.serial != 0) block.scalars->settings_serial = settings.serial;
}

}  // namespace

cudaError_t launch_advance_step(const step_block_view& block, const settings_batch& settings,
                                const double* totals, block_message* messages, launch_order order,
                                cudaStream_t stream) {
  return launch(advance_step_kernel, prepare_blocks(block.group_count), threads, order, stream,
                block, settings, totals, messages);
}

cudaError_t launch_apply_settings(const step_block_view& block, const settings_batch& settings,
                                  cudaStream_t stream) {
  return launch(apply_settings_kernel, 1, threads, launch_order::full, stream, block, settings);
}

}  // namespace stepgraph::cuda
