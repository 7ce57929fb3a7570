#include "dependent_launch.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"

namespace stepgraph::cuda {
namespace {

__global__ void begin_loop_kernel(cudaGraphConditionalHandle condition, std::uint32_t* left,
                                  std::uint32_t steps) {
  let_successors_start();
  wait_for_predecessors();
  // Whatever an earlier launch left behind, if it failed in its middle.
  *left = steps;
  cudaGraphSetConditional(condition, steps != 0 ? 1u : 0u);
}

__global__ void end_of_step_kernel(cudaGraphConditionalHandle condition, std::uint32_t* left) {
  let_successors_start();
  wait_for_predecessors();
  const std::uint32_t now = *left - 1;
  *left = now;
  cudaGraphSetConditional(condition, now != 0 ? 1u : 0u);
}

}  // namespace

cudaError_t launch_begin_loop(cudaGraphConditionalHandle condition, std::uint32_t* left,
                              std::uint32_t steps, cudaStream_t stream) {
  return launch(begin_loop_kernel, 1, 1, launch_order::full, stream, condition, left, steps);
}

cudaError_t launch_end_of_step(cudaGraphConditionalHandle condition, std::uint32_t* left,
                               cudaStream_t stream) {
  return launch(end_of_step_kernel, 1, 1, launch_order::full, stream, condition, left);
}

}  // namespace stepgraph::cuda
