#include "device_data.hpp"

namespace stepgraph::perf {
namespace {

constexpr int fill_threads = 256;
constexpr int fill_blocks = 4096;

template <storage_format Format>
__global__ void fill_kernel(void* data, std::uint64_t elements, random_range range) {
  auto* target = static_cast<typename stored_element<Format>::type*>(data);
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
       i < elements; i += stride) {
    target[i] = random_element<Format>(range, i);
  }
}

__device__ std::uint64_t device_nanoseconds() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__global__ void spin_kernel(std::uint64_t nanoseconds) {
  const std::uint64_t begin = device_nanoseconds();
  while (device_nanoseconds() - begin < nanoseconds) {
  }
}

__global__ void store_scalar_kernel(float* target, float value) { *target = value; }

}  // namespace

cudaError_t cuda_fill_random(void* data, storage_format format, std::uint64_t elements,
                             const random_range& range) {
  with_format(format, [&](auto constant) {
    fill_kernel<decltype(constant)::value><<<fill_blocks, fill_threads>>>(data, elements, range);
  });
  return cudaGetLastError();
}

cudaError_t cuda_launch_spin(double seconds, cudaStream_t stream) {
  spin_kernel<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(seconds * 1e9));
  return cudaGetLastError();
}

cudaError_t cuda_launch_store_scalar(float* target, float value, cudaStream_t stream) {
  store_scalar_kernel<<<1, 1, 0, stream>>>(target, value);
  return cudaGetLastError();
}

}  // namespace stepgraph::perf
