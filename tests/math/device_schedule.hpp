#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "stepgraph/math/schedule.hpp"

namespace stepgraph::test {

/// values[i] = the value of one segment, by itself, at clock first + i * stride. Device memory.
cudaError_t evaluate_on_device(const schedule_segment* segment, const double* table,
                               std::uint64_t first, std::uint64_t stride, double* values,
                               std::uint32_t count);

}  // namespace stepgraph::test
