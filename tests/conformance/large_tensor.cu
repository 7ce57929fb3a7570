#include "conformance/large_tensor.hpp"
#include "stepgraph/math/remainder.hpp"

namespace stepgraph::test {
namespace {

constexpr std::uint32_t blocks = 2048;
constexpr std::uint32_t threads = 256;
constexpr std::uint64_t all_threads = static_cast<std::uint64_t>(blocks) * threads;

__device__ std::uint64_t first_element() {
  return blockIdx.x * static_cast<std::uint64_t>(threads) + threadIdx.x;
}

template <class Code>
__global__ void fill_kernel(Code* codes, std::uint64_t numel, palette colours) {
  for (std::uint64_t i = first_element(); i < numel; i += all_threads) {
    codes[i] = static_cast<Code>(colours[turn_of(i)]);
  }
}

template <class Code>
__global__ void count_kernel(const Code* codes, std::uint64_t numel, palette expected,
                             unsigned long long* unlike) {
  unsigned long long mine = 0;
  for (std::uint64_t i = first_element(); i < numel; i += all_threads) {
    mine += codes[i] != expected[turn_of(i)] ? 1 : 0;
  }
  if (mine != 0) atomicAdd(unlike, mine);
}

__global__ void fill_masters_kernel(std::uint16_t* parameters, std::uint16_t* remainders,
                                    std::uint32_t first, std::uint32_t count) {
  for (std::uint64_t i = first_element(); i < count; i += all_threads) {
    const float master = math::bits_to_float(first + static_cast<std::uint32_t>(i));
    parameters[i] = math::rounded_parameter(master);
    remainders[i] = math::remainder_of(master);
  }
}

__global__ void count_masters_kernel(const std::uint16_t* parameters,
                                     const std::uint16_t* remainders, std::uint32_t first,
                                     std::uint32_t count, unsigned long long* changed) {
  unsigned long long mine = 0;
  for (std::uint64_t i = first_element(); i < count; i += all_threads) {
    const std::uint32_t bits = first + static_cast<std::uint32_t>(i);
    if ((bits & 0x7f800000u) == 0x7f800000u) continue;
    const float master = math::bits_to_float(bits);
    const bool same = parameters[i] == math::rounded_parameter(master) &&
                      remainders[i] == math::remainder_of(master);
    mine += same ? 0 : 1;
  }
  if (mine != 0) atomicAdd(changed, mine);
}

/// Calls `body` with a null pointer to codes of this size.
template <class Body>
cudaError_t with_code_of(std::size_t size, Body&& body) {
  if (size == 1) {
    body(static_cast<std::uint8_t*>(nullptr));
  } else if (size == 2) {
    body(static_cast<std::uint16_t*>(nullptr));
  } else {
    body(static_cast<std::uint32_t*>(nullptr));
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t fill(void* codes, std::size_t size, std::uint64_t numel, const palette& colours) {
  return with_code_of(size, [&](auto* typed) {
    fill_kernel<<<blocks, threads>>>(static_cast<decltype(typed)>(codes), numel, colours);
  });
}

cudaError_t count_unlike(const void* codes, std::size_t size, std::uint64_t numel,
                         const palette& expected, unsigned long long* unlike) {
  return with_code_of(size, [&]<class Code>(Code*) {
    count_kernel<<<blocks, threads>>>(static_cast<const Code*>(codes), numel, expected, unlike);
  });
}

cudaError_t fill_masters(std::uint16_t* parameters, std::uint16_t* remainders, std::uint32_t first,
                         std::uint32_t count) {
  fill_masters_kernel<<<blocks, threads>>>(parameters, remainders, first, count);
  return cudaGetLastError();
}

cudaError_t count_changed_masters(const std::uint16_t* parameters, const std::uint16_t* remainders,
                                  std::uint32_t first, std::uint32_t count,
                                  unsigned long long* changed) {
  count_masters_kernel<<<blocks, threads>>>(parameters, remainders, first, count, changed);
  return cudaGetLastError();
}

}  // namespace stepgraph::test
