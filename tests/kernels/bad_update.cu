// What an update kernel must not look like: the disassembly test shows that its checks reject this
// one. Never run.
#include <cmath>
#include <cstdint>

namespace stepgraph::test {

/// Scalar accesses and the bias correction by pow in double, once an element.
__global__ void update_with_double_power(float* parameter, const float* gradient, float* exp_avg,
                                         float* exp_avg_sq, const int* step, std::uint64_t numel) {
  const std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
  if (i >= numel) return;
  const double correction1 = 1.0 - pow(0.9, static_cast<double>(*step));
  const double correction2 = 1.0 - pow(0.999, static_cast<double>(*step));
  exp_avg[i] += 0.1f * (gradient[i] - exp_avg[i]);
  exp_avg_sq[i] += 0.001f * (gradient[i] * gradient[i] - exp_avg_sq[i]);
  parameter[i] -= static_cast<float>(1e-3 * exp_avg[i] / correction1 /
                                     (sqrt(exp_avg_sq[i] / correction2) + 1e-8));
}

/// Registers that are indexed at run time live in local memory.
__global__ void update_with_local_array(float* parameter, const int* order) {
  float values[32];
  for (int i = 0; i < 32; ++i) values[order[i + 32] & 31] = parameter[i];
  for (int i = 0; i < 32; ++i) parameter[i] = values[order[i] & 31];
}

}  // namespace stepgraph::test
