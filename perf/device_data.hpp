#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "random_values.hpp"

/// Small kernels of the benchmarks' own.
namespace stepgraph::perf {

/// Fills `elements` elements of a format other than `none`. Enqueued onto the default stream.
cudaError_t cuda_fill_random(void* data, storage_format format, std::uint64_t elements,
                             const random_range& range);

/// Keeps `stream` busy for `seconds`, so that what is enqueued meanwhile starts without a gap.
cudaError_t cuda_launch_spin(double seconds, cudaStream_t stream);

/// Stores one number: how frameworks change a scalar that lives on the device.
cudaError_t cuda_launch_store_scalar(float* target, float value, cudaStream_t stream);

}  // namespace stepgraph::perf
