#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

/// Fills and checks tensors too large for the host, on the device.
namespace stepgraph::test {

/// Four codes that take turns over a tensor. Elements 2^31 and 2^32 apart have different codes, so
/// that an index that wrapped around shows.
using palette = std::array<std::uint32_t, 4>;

/// The turn of element `i`.
inline constexpr std::uint32_t turn_of(std::uint64_t i) {
  return static_cast<std::uint32_t>((i ^ (i >> 5) ^ (i >> 31)) & 3u);
}

/// Elements are codes of `size` bytes: 1, 2 or 4.
cudaError_t fill(void* codes, std::size_t size, std::uint64_t numel, const palette& colours);

/// Adds to `*unlike`, in device memory, how many elements differ from what was expected.
cudaError_t count_unlike(const void* codes, std::size_t size, std::uint64_t numel,
                         const palette& expected, unsigned long long* unlike);

/// Splits the f32 with the bits first, first + 1, ... into bf16 parameters and remainders.
cudaError_t fill_masters(std::uint16_t* parameters, std::uint16_t* remainders, std::uint32_t first,
                         std::uint32_t count);

/// Adds to `*changed` how many finite ones are not what `fill_masters` stored.
cudaError_t count_changed_masters(const std::uint16_t* parameters, const std::uint16_t* remainders,
                                  std::uint32_t first, std::uint32_t count,
                                  unsigned long long* changed);

}  // namespace stepgraph::test
