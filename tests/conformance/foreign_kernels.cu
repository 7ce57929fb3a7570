#include "conformance/foreign_kernels.hpp"

namespace stepgraph::test {
namespace {

__global__ void append_kernel(std::uint32_t* log, std::uint32_t entry) {
  const std::uint32_t at = log[0];
  if (at < log_capacity) log[1 + at] = entry;
  log[0] = at + 1;
}

__global__ void fill_slowly_kernel(float* data, std::uint64_t numel, float value,
                                   unsigned microseconds) {
  const std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
  if (i == 0) {
    for (unsigned waited = 0; waited < microseconds; ++waited) __nanosleep(1000);
  }
  if (i < numel) data[i] = value;
}

__global__ void add_kernel(float* data, std::uint64_t numel, float value) {
  const std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
  if (i < numel) data[i] += value;
}

constexpr unsigned threads = 256;
unsigned blocks_for(std::uint64_t numel) {
  return static_cast<unsigned>((numel + threads - 1) / threads);
}

}  // namespace

// Launches are checked by themselves: inside a broken capture the error must stay the caller's.
void append_async(std::uint32_t* log, std::uint32_t entry, cudaStream_t stream) {
  append_kernel<<<1, 1, 0, stream>>>(log, entry);
  check(cudaGetLastError());
}

void fill_slowly_async(float* data, std::uint64_t numel, float value, unsigned microseconds,
                       cudaStream_t stream) {
  fill_slowly_kernel<<<blocks_for(numel), threads, 0, stream>>>(data, numel, value, microseconds);
  check(cudaGetLastError());
}

void add_async(float* data, std::uint64_t numel, float value, cudaStream_t stream) {
  add_kernel<<<blocks_for(numel), threads, 0, stream>>>(data, numel, value);
  check(cudaGetLastError());
}

}  // namespace stepgraph::test
