// What update kernels must not look like: the disassembly test shows that its checks reject these.
// Never run.
#include <cmath>
#include <cstdint>

#include "../../kernels/src/update_kernel.cuh"
#include "stepgraph/math/adam.hpp"

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

/// Four elements by whole accesses.
__device__ __forceinline__ void update_four(const math::adam_terms& terms, float4* parameter,
                                            float4* gradient, float4* exp_avg, float4* exp_avg_sq) {
  float4 p = *parameter;
  float4 m = *exp_avg;
  float4 v = *exp_avg_sq;
  const float4 g = *gradient;
  float unused = 0.0f;
  math::adam_update(terms, false, g.x, p.x, m.x, v.x, unused);
  math::adam_update(terms, false, g.y, p.y, m.y, v.y, unused);
  math::adam_update(terms, false, g.z, p.z, m.z, v.z, unused);
  math::adam_update(terms, false, g.w, p.w, m.w, v.w, unused);
  *parameter = p;
  *exp_avg = m;
  *exp_avg_sq = v;
  *gradient = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

/// Wide accesses, but the terms are read again for every access: stores may alias them.
__global__ void update_with_terms_read_again(float4* parameter, float4* gradient, float4* exp_avg,
                                             float4* exp_avg_sq, const math::adam_terms* terms) {
#pragma unroll
  for (int pack = 0; pack < 2; ++pack) {
    const unsigned int i = (blockIdx.x * 2 + pack) * blockDim.x + threadIdx.x;
    update_four(*terms, parameter + i, gradient + i, exp_avg + i, exp_avg_sq + i);
  }
}

/// The same in a loop that is not unrolled.
__global__ void update_in_a_loop(float4* parameter, float4* gradient, float4* exp_avg,
                                 float4* exp_avg_sq, const math::adam_terms* terms, int packs) {
#pragma unroll 1
  for (int pack = 0; pack < packs; ++pack) {
    const unsigned int i = (blockIdx.x * packs + pack) * blockDim.x + threadIdx.x;
    update_four(*terms, parameter + i, gradient + i, exp_avg + i, exp_avg_sq + i);
  }
}

/// After the wait, a skipped step ends before the last part of the terms is read.
__global__ void update_with_late_terms(uint4* parameter, const uint4* terms) {
  cuda::let_successors_start();
  cuda::wait_for_predecessors();
  const uint4 first = cuda::load_16_bytes_now(terms);
  const uint4 second = cuda::load_16_bytes_now(terms + 1);
  parameter[0] = first;
  parameter[1] = second;
  if (first.x == 0) return;
  parameter[2] = cuda::load_16_bytes_now(terms + 2);
}

/// After the wait, the second part of the terms is read under a predicate that the first decides.
__global__ void update_with_predicated_terms(uint4* parameter, const uint4* terms) {
  cuda::let_successors_start();
  cuda::wait_for_predecessors();
  const uint4 first = cuda::load_16_bytes_now(terms);
  uint4 second = make_uint4(0, 0, 0, 0);
  if (first.x != 0) second = cuda::load_16_bytes_now(terms + 1);
  parameter[0] = first;
  parameter[1] = second;
}

}  // namespace stepgraph::test
