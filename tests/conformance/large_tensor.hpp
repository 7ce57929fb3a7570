#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

/// Fills and checks tensors too large for the host, on the device.
namespace stepgraph::test {

/// Four 16-bit codes that take turns over a tensor. Elements 2^31 and 2^32 apart have different
/// codes, so that an index that wrapped around shows.
using palette = std::array<std::uint16_t, 4>;

/// The turn of element `i`.
inline constexpr std::uint32_t turn_of(std::uint64_t i) {
  return static_cast<std::uint32_t>((i ^ (i >> 5) ^ (i >> 31)) & 3u);
}

cudaError_t fill(std::uint16_t* codes, std::uint64_t numel, const palette& colours);

/// Adds to `*unlike`, in device memory, how many elements differ from what was expected.
cudaError_t count_unlike(const std::uint16_t* codes, std::uint64_t numel, const palette& expected,
                         unsigned long long* unlike);
cudaError_t count_unlike(const float* values, std::uint64_t numel, float expected,
                         unsigned long long* unlike);

}  // namespace stepgraph::test
