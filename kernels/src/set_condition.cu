#include "dependent_launch.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"

namespace stepgraph::cuda {
namespace {

__global__ void set_condition_kernel(cudaGraphConditionalHandle condition,
                                     const step_scalars* scalars) {
  let_successors_start();
  wait_for_predecessors();
  cudaGraphSetConditional(condition, scalars->skip == 0 ? 1u : 0u);
}

}  // namespace

cudaError_t launch_set_condition(cudaGraphConditionalHandle condition, const step_block_view& block,
                                 cudaStream_t stream) {
  return launch(set_condition_kernel, 1, 1, launch_order::full, stream, condition, block.scalars);
}

}  // namespace stepgraph::cuda
