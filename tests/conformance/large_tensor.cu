#include "conformance/large_tensor.hpp"

namespace stepgraph::test {
namespace {

constexpr std::uint32_t blocks = 2048;
constexpr std::uint32_t threads = 256;

__device__ std::uint64_t first_element() {
  return blockIdx.x * static_cast<std::uint64_t>(threads) + threadIdx.x;
}

__global__ void fill_kernel(std::uint16_t* codes, std::uint64_t numel, palette colours) {
  for (std::uint64_t i = first_element(); i < numel; i += blocks * threads) {
    codes[i] = colours[turn_of(i)];
  }
}

__global__ void count_codes_kernel(const std::uint16_t* codes, std::uint64_t numel,
                                   palette expected, unsigned long long* unlike) {
  unsigned long long mine = 0;
  for (std::uint64_t i = first_element(); i < numel; i += blocks * threads) {
    mine += codes[i] != expected[turn_of(i)] ? 1 : 0;
  }
  if (mine != 0) atomicAdd(unlike, mine);
}

__global__ void count_values_kernel(const float* values, std::uint64_t numel, float expected,
                                    unsigned long long* unlike) {
  unsigned long long mine = 0;
  for (std::uint64_t i = first_element(); i < numel; i += blocks * threads) {
    mine += values[i] != expected ? 1 : 0;
  }
  if (mine != 0) atomicAdd(unlike, mine);
}

}  // namespace

cudaError_t fill(std::uint16_t* codes, std::uint64_t numel, const palette& colours) {
  fill_kernel<<<blocks, threads>>>(codes, numel, colours);
  return cudaGetLastError();
}

cudaError_t count_unlike(const std::uint16_t* codes, std::uint64_t numel, const palette& expected,
                         unsigned long long* unlike) {
  count_codes_kernel<<<blocks, threads>>>(codes, numel, expected, unlike);
  return cudaGetLastError();
}

cudaError_t count_unlike(const float* values, std::uint64_t numel, float expected,
                         unsigned long long* unlike) {
  count_values_kernel<<<blocks, threads>>>(values, numel, expected, unlike);
  return cudaGetLastError();
}

}  // namespace stepgraph::test
