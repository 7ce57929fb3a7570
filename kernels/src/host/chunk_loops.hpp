#pragma once

#include "stepgraph/kernels/step_block.hpp"
#include "stepgraph/math/stochastic_rounding.hpp"

namespace stepgraph::host {

/// What the threads of one `grad_stats` block hold: the three parts of math::scaled_sum.
struct thread_sums {
  float small[statistics_threads] = {};
  float medium[statistics_threads] = {};
  float large[statistics_threads] = {};
};

/// The loops over the elements of one chunk. Compiled once per instruction set from
/// chunk_loops.cpp; every version gives the same bits.
struct chunk_loops {
  /// Updates a chunk; returns the largest magnitude among the new weights of an FP8 parameter (as
  /// f32 bits; 0 for other parameters).
  std::uint32_t (*update)(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                          const math::adam_terms& terms, const math::rounding_source& rounding);
  /// Adds the squares of a chunk's gradients to the threads that own them; returns 1 if an element
  /// is not finite, else 0.
  std::uint32_t (*add_squares)(const tensor_descriptor& tensor, std::uint64_t begin,
                               std::uint64_t count, thread_sums& sums);
};

chunk_loops chunk_loops_baseline();
#if defined(__x86_64__)
chunk_loops chunk_loops_avx2();
chunk_loops chunk_loops_avx512();
#endif

/// The loops for the processor this runs on.
const chunk_loops& fastest_chunk_loops();

}  // namespace stepgraph::host
