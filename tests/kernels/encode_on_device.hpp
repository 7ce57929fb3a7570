#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "stepgraph/math/storage_format.hpp"

namespace stepgraph::test {

/// codes[i] = encode(float with the bits i * stride), by the device's conversions.
cudaError_t encode_on_device(storage_format format, std::uint32_t stride, std::uint16_t* codes,
                             std::uint32_t count);

/// bits[code] = the f32 bits of each of the 65536 codes, by the device's conversions.
cudaError_t decode_on_device(storage_format format, std::uint32_t* bits);

}  // namespace stepgraph::test
