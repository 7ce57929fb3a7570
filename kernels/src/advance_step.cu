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
                        const double* totals, std::uint32_t* arrivals) {
  let_successors_start();
  wait_for_predecessors();
  prepare_step_in_block(block, settings, blockIdx.x);
  if (gridDim.x == 1) {
    __syncthreads();
  } else if (!is_last_block(arrivals)) {
    return;
  }
  finish_inputs inputs = read_finish_inputs(block);
  gradient_statistics statistics;
  if (totals != nullptr) {
    statistics.measured = 1;
    statistics.total = math::combined_total(totals, block.norm_group_count, block.step->norm);
    statistics.zeros = static_cast<std::uint64_t>(totals[block.norm_group_count]);
  }
  __syncthreads();
  finish_step_in_block(
      block, settings, statistics, [&](std::uint32_t i) { return totals[i]; }, inputs);
}

__global__ void __launch_bounds__(threads)
    apply_settings_kernel(step_block_view block, const __grid_constant__ settings_batch settings) {
  std::uint64_t samples = 0;
  apply_settings_in_block(block, settings, 0, block.group_count, true, samples);
  // Every thread has read the serial.
  __syncthreads();
  if (threadIdx.x == 0 && settings.serial != 0) block.scalars->settings_serial = settings.serial;
}

}  // namespace

cudaError_t launch_advance_step(const step_block_view& block, const settings_batch& settings,
                                const double* totals, std::uint32_t* arrivals, launch_order order,
                                cudaStream_t stream) {
  return launch(advance_step_kernel, prepare_blocks(block.group_count), threads, order, stream,
                block, settings, totals, arrivals);
}

cudaError_t launch_apply_settings(const step_block_view& block, const settings_batch& settings,
                                  cudaStream_t stream) {
  return launch(apply_settings_kernel, 1, threads, launch_order::full, stream, block, settings);
}

}  // namespace stepgraph::cuda
