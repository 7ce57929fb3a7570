#pragma once

#include "stepgraph/kernels/step_block.hpp"
#include "stepgraph/math/stochastic_rounding.hpp"

namespace stepgraph::host {

/// The elements of a chunk: `count` of them from `begin` on.
struct chunk_range {
  std::uint64_t begin;
  std::uint64_t count;
};

inline chunk_range elements_of(const chunk_descriptor& chunk, const tensor_descriptor& tensor) {
  const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
  const std::uint64_t remaining = tensor.numel - begin;
  return {begin, remaining < chunk_elements ? remaining : chunk_elements};
}

/// What the threads of one `grad_stats` block hold.
struct thread_statistics {
  double sum[statistics_threads] = {};  ///< of squares
  std::uint32_t largest = 0;            ///< magnitude bits, of all threads together
  std::uint32_t zeros = 0;              ///< likewise
};

/// The loops over the elements of one chunk. Compiled once per instruction set from
/// chunk_loops.cpp; every version gives the same bits.
struct chunk_loops {
  /// Updates a chunk; returns the largest magnitude among the new weights of an FP8 parameter (as
  /// f32 bits; 0 for other parameters).
  std::uint32_t (*update)(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                          const math::adam_terms& terms, const math::rounding_source& rounding);
  /// Adds the gradients of a chunk to the threads that own them.
  void (*add_gradients)(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                        const statistics_options& options, thread_statistics& found);
  /// Multiplies the gradients of a chunk by `factor` and rounds them to their format.
  void (*scale_gradients)(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                          float factor);
};

chunk_loops chunk_loops_baseline();
#if defined(__x86_64__)
chunk_loops chunk_loops_avx2();
chunk_loops chunk_loops_avx512();
#endif

/// The loops for the processor this runs on.
const chunk_loops& fastest_chunk_loops();

}  // namespace stepgraph::host
