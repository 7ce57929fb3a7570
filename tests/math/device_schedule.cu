#include "math/device_schedule.hpp"

namespace stepgraph::test {
namespace {

__global__ void evaluate_kernel(const schedule_segment* segment, const double* table,
                                std::uint64_t first, std::uint64_t stride, double* values,
                                std::uint32_t count) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] = math::value_at(segment, 1, table, first + i * stride);
}

}  // namespace

cudaError_t evaluate_on_device(const schedule_segment* segment, const double* table,
                               std::uint64_t first, std::uint64_t stride, double* values,
                               std::uint32_t count) {
  constexpr std::uint32_t threads = 256;
  evaluate_kernel<<<(count + threads - 1) / threads, threads>>>(segment, table, first, stride,
                                                                values, count);
  return cudaGetLastError();
}

}  // namespace stepgraph::test
