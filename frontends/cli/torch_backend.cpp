#include "torch_backend.hpp"

#include <torch/torch.h>

#include "stepgraph/libtorch/cuda_backend.hpp"

#if defined(STEPGRAPH_TORCH_CUDA)
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

namespace stepgraph::cli {

torch_backend find_torch_backend() {
  torch_backend backend{.version = TORCH_VERSION, .cuda_problem = ""};
  libtorch::load_torch_cuda_backend(&backend.cuda_problem);
  return backend;
}

#if defined(STEPGRAPH_TORCH_CUDA)

std::string current_gpu_name() {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, c10::cuda::current_device()));
  return properties.name;
}

#else

std::string current_gpu_name() { return "cuda"; }

#endif

}  // namespace stepgraph::cli
