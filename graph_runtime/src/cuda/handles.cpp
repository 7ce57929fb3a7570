#include "stepgraph/cuda/handles.hpp"

#include "stepgraph/cuda/check.hpp"

namespace stepgraph::cuda {

unique_stream make_stream() {
  cudaStream_t handle = nullptr;
  STEPGRAPH_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
  return unique_stream(handle);
}

unique_event make_event() {
  cudaEvent_t handle = nullptr;
  STEPGRAPH_CUDA_CHECK(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming));
  return unique_event(handle);
}

unique_device_memory allocate_device(std::size_t bytes) {
  void* memory = nullptr;
  STEPGRAPH_CUDA_CHECK(cudaMalloc(&memory, bytes));
  return unique_device_memory(memory);
}

unique_pinned_memory allocate_pinned(std::size_t bytes) {
  void* memory = nullptr;
  STEPGRAPH_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  return unique_pinned_memory(memory);
}

device_guard::device_guard(int device) {
  int current = 0;
  STEPGRAPH_CUDA_CHECK(cudaGetDevice(&current));
  if (current == device) return;
  STEPGRAPH_CUDA_CHECK(cudaSetDevice(device));
  previous_ = current;
}

device_guard::~device_guard() {
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

}  // namespace stepgraph::cuda
