#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "device_data.hpp"

namespace stepgraph::perf {
namespace {

constexpr int threads = 256;
constexpr int elements_per_block = 2048;

/// A well mixed 64-bit hash of a counter (the finaliser of splitmix64, Steele et al. 2014).
__device__ std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ void assign(float& target, float value) { target = value; }
__device__ void assign(__half& target, float value) { target = __float2half_rn(value); }
__device__ void assign(__nv_bfloat16& target, float value) { target = __float2bfloat16_rn(value); }

template <class Element>
__global__ void fill_kernel(Element* data, std::uint64_t elements, float low, float high,
                            std::uint64_t seed) {
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
       i < elements; i += stride) {
    const float unit = static_cast<float>(mixed(seed << 48 ^ i) >> 40) * 0x1p-24f;
    assign(data[i], low + (high - low) * unit);
  }
}

/// Accesses of 16 bytes that a thread makes to an operand of 4-byte elements.
constexpr int most_accesses = elements_per_block * 4 / 16 / threads;

__global__ void __launch_bounds__(threads)
    pure_stream_kernel(pure_stream_operands operands, unsigned int zero) {
  uint4 held[5][most_accesses] = {};
#pragma unroll
  for (int o = 0; o < 5; ++o) {
    if (o >= operands.count || !operands.entries[o].read) continue;
    const auto entry = operands.entries[o];
    const uint4* source = static_cast<const uint4*>(entry.data) +
                          static_cast<std::uint64_t>(blockIdx.x) * 128 * entry.element_bytes;
#pragma unroll
    for (int access = 0; access < most_accesses; ++access) {
      const int at = access * threads + static_cast<int>(threadIdx.x);
      if (at < 128 * static_cast<int>(entry.element_bytes)) held[o][access] = source[at];
    }
  }
#pragma unroll
  for (int o = 0; o < 5; ++o) {
    if (o >= operands.count || !operands.entries[o].written) continue;
    const auto entry = operands.entries[o];
    uint4* target = static_cast<uint4*>(entry.data) +
                    static_cast<std::uint64_t>(blockIdx.x) * 128 * entry.element_bytes;
#pragma unroll
    for (int access = 0; access < most_accesses; ++access) {
      const int at = access * threads + static_cast<int>(threadIdx.x);
      // `zero` is 0, which the compiler cannot know: every read is needed, no value changes.
      held[o][access].x ^= held[0][access].x & zero;
      if (at < 128 * static_cast<int>(entry.element_bytes)) target[at] = held[o][access];
    }
  }
}

}  // namespace

void fill_random(void* data, storage_format format, std::uint64_t elements, float low, float high,
                 std::uint64_t seed) {
  constexpr int blocks = 4096;
  switch (format) {
    case storage_format::f32:
      fill_kernel<<<blocks, threads>>>(static_cast<float*>(data), elements, low, high, seed);
      break;
    case storage_format::f16:
      fill_kernel<<<blocks, threads>>>(static_cast<__half*>(data), elements, low, high, seed);
      break;
    case storage_format::bf16:
      fill_kernel<<<blocks, threads>>>(static_cast<__nv_bfloat16*>(data), elements, low, high,
                                       seed);
      break;
    case storage_format::none:
      break;
  }
  if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("fill_random failed to launch");
}

cudaError_t cuda_launch_pure_stream(const pure_stream_operands& operands, std::uint64_t elements,
                                    cudaStream_t stream) {
  pure_stream_kernel<<<static_cast<unsigned int>(elements / elements_per_block), threads, 0,
                       stream>>>(operands, 0u);
  return cudaGetLastError();
}

}  // namespace stepgraph::perf
