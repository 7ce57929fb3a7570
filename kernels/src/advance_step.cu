#include "advance_step_block.cuh"
#include "dependent_launch.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"
#include "stepgraph/kernels/launch_shape.hpp"

namespace stepgraph::cuda {
namespace {

constexpr int threads = advance_step_threads;

__global__ void __launch_bounds__(threads)
    advance_step_kernel(step_block_view block, settings_batch settings) {
  let_successors_start();
  wait_for_predecessors();
  advance_step_in_block(block, settings, gradient_statistics{});
}

__global__ void __launch_bounds__(threads)
    apply_settings_kernel(step_block_view block, settings_batch settings) {
  apply_settings_in_block(block, settings);
}

}  // namespace

cudaError_t launch_advance_step(const step_block_view& block, const settings_batch& settings,
                                launch_order order, cudaStream_t stream) {
  return launch(advance_step_kernel, 1, threads, order, stream, block, settings);
}

cudaError_t launch_apply_settings(const step_block_view& block, const settings_batch& settings,
                                  cudaStream_t stream) {
  return launch(apply_settings_kernel, 1, threads, launch_order::full, stream, block, settings);
}

}  // namespace stepgraph::cuda
