#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "stepgraph/kernels/cuda_launch.hpp"

/// Programmatic dependent launch, in the kernels and at their launch.
namespace stepgraph::cuda {

/// Waits until every kernel this launch depends on has finished and its writes are visible. What
/// stands before may read only what no kernel of the same step writes.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel of the step start, once every block of this one has called it or ended.
__device__ __forceinline__ void let_successors_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Launches `kernel` with one attribute: whether it may overlap its predecessor. Devices before
/// compute capability 9.0 ignore the request.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), std::uint32_t blocks, std::uint32_t threads,
                   launch_order order, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (order == launch_order::programmatic) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace stepgraph::cuda
