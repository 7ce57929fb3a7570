#pragma once

#include <cmath>

/// Marks a function that is compiled for the host and, by nvcc, for the device too.
///
/// Always inline: the host loops are compiled once per instruction set, and an out-of-line copy
/// compiled for a newer processor must never be the one the linker keeps for an older one.
#if defined(__CUDACC__)
#define STEPGRAPH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define STEPGRAPH_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace stepgraph::math {

// Every fused multiply-add of the library is one of these two calls; contraction is off in all
// our compilations, so the host and the device round at the same places.

/// a * b + c with one rounding.
STEPGRAPH_HOST_DEVICE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

/// a * b + c with one rounding.
STEPGRAPH_HOST_DEVICE double fused_multiply_add(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

/// IEEE square root, rounded to nearest.
STEPGRAPH_HOST_DEVICE float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

/// IEEE square root, rounded to nearest.
STEPGRAPH_HOST_DEVICE double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

}  // namespace stepgraph::math
