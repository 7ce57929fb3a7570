#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "stepgraph/math/storage_format.hpp"

/// Element math on the device over ranges of inputs, for comparison with the host.
namespace stepgraph::test {

/// codes[i] = encode(float with the bits i * stride), by the device's conversions: one by one, or
/// in the packs that the update kernels use.
enum class conversion { single, packed };
cudaError_t encode_on_device(storage_format format, conversion by, std::uint32_t stride,
                             std::uint16_t* codes, std::uint32_t count);

/// bits[code] = the f32 bits of each of the first `count` codes, by the device's conversions.
cudaError_t decode_on_device(storage_format format, conversion by, std::uint32_t* bits,
                             std::uint32_t count);

/// results[i] = function(float with the bits first + i).
enum class element_function { restricted_square_root, restricted_reciprocal };
cudaError_t apply_on_device(element_function function, std::uint32_t first, float* results,
                            std::uint32_t count);

/// Adds to `*changed` the f32 of all 2^32 bit patterns that are not what they were after they were
/// split into a parameter and its remainder and joined again.
cudaError_t count_changed_by_remainder(unsigned long long* changed);

}  // namespace stepgraph::test
