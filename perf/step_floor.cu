#include <cub/device/device_reduce.cuh>

#include "step_floor.hpp"
#include "stepgraph/cuda/check.hpp"

namespace stepgraph::perf {

step_floor::step_floor(const benchmark_problem& problem, cudaStream_t stream)
    : update_(problem.stream_limit(stream)),
      gradients_(static_cast<float*>(problem.address(operand_kind::gradient, 0))),
      elements_(problem.element_count()),
      result_(cuda::allocate_device(sizeof(float))),
      original_gradients_(cuda::allocate_device(elements_ * sizeof(float))) {
  STEPGRAPH_CUDA_CHECK(cudaMemcpyAsync(original_gradients_.get(), gradients_,
                                       elements_ * sizeof(float), cudaMemcpyDeviceToDevice,
                                       stream));
  STEPGRAPH_CUDA_CHECK(cub::DeviceReduce::Sum(nullptr, workspace_bytes_, gradients_,
                                              static_cast<float*>(result_.get()), elements_,
                                              stream));
  workspace_ = cuda::allocate_device(workspace_bytes_);
}

void step_floor::read_gradients(cudaStream_t stream) const {
  std::size_t bytes = workspace_bytes_;
  STEPGRAPH_CUDA_CHECK(cub::DeviceReduce::Sum(
      workspace_.get(), bytes, gradients_, static_cast<float*>(result_.get()), elements_, stream));
}

void step_floor::zero_gradients(cudaStream_t stream) const {
  STEPGRAPH_CUDA_CHECK(cudaMemsetAsync(gradients_, 0, elements_ * sizeof(float), stream));
}

void step_floor::restore_gradients(cudaStream_t stream) const {
  STEPGRAPH_CUDA_CHECK(cudaMemcpyAsync(gradients_, original_gradients_.get(),
                                       elements_ * sizeof(float), cudaMemcpyDeviceToDevice,
                                       stream));
}

}  // namespace stepgraph::perf
