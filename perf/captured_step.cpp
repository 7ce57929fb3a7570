#include "captured_step.hpp"

#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"

namespace stepgraph::perf {

captured_step::captured_step(stream_executor& executor) {
  const cuda::unique_stream stream = cuda::make_stream();
  cuda::capture_scope capture(stream.get());
  executor.launch(stream.get());
  graph_ = capture.finish();
  std::size_t count = 1;
  STEPGRAPH_CUDA_CHECK(cudaGraphGetRootNodes(graph_.get(), &first_kernel_, &count));
  instantiate();
}

void captured_step::launch(cudaStream_t stream) const {
  STEPGRAPH_CUDA_CHECK(cudaGraphLaunch(executable_.get(), stream));
}

void captured_step::set_first_kernel_parameters() {
  cudaKernelNodeParams parameters = {};
  STEPGRAPH_CUDA_CHECK(cudaGraphKernelNodeGetParams(first_kernel_, &parameters));
  STEPGRAPH_CUDA_CHECK(
      cudaGraphExecKernelNodeSetParams(executable_.get(), first_kernel_, &parameters));
}

void captured_step::update() {
  cudaGraphExecUpdateResultInfo result = {};
  STEPGRAPH_CUDA_CHECK(cudaGraphExecUpdate(executable_.get(), graph_.get(), &result));
}

void captured_step::instantiate() {
  cudaGraphExec_t handle = nullptr;
  STEPGRAPH_CUDA_CHECK(cudaGraphInstantiate(&handle, graph_.get(), 0));
  executable_ = cuda::unique_graph_exec(handle);
}

}  // namespace stepgraph::perf
