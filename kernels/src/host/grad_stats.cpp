#include <vector>

#include "chunk_loops.hpp"
#include "stepgraph/kernels/host_loops.hpp"
#include "stepgraph/math/sum_of_squares.hpp"

// Adds in the order of grad_stats.cu, written there: per position in a run of 16 bytes, then per
// thread, then by halving distances over the warp, over the warps, and over the blocks.
namespace stepgraph::host {
namespace {

struct thread_totals {
  double value[statistics_threads] = {};
};

/// The block reduction of grad_stats.cu.
double reduce_over_block(thread_totals totals) {
  constexpr int warps = static_cast<int>(statistics_threads) / 32;
  for (int warp = 0; warp < warps; ++warp) {
    double* lane = totals.value + warp * 32;
    for (int distance = 16; distance > 0; distance /= 2) {
      for (int i = 0; i < distance; ++i) lane[i] += lane[i + distance];
    }
  }
  for (int distance = warps / 2; distance > 0; distance /= 2) {
    for (int warp = 0; warp < distance; ++warp) {
      totals.value[warp * 32] += totals.value[(warp + distance) * 32];
    }
  }
  return totals.value[0];
}

}  // namespace

gradient_statistics grad_stats(const tensor_table_view& table) {
  const chunk_loops& loops = fastest_chunk_loops();
  const std::uint64_t per_block = chunks_per_statistics_block(table.chunk_count);
  const std::uint64_t blocks = (table.chunk_count + per_block - 1) / per_block;
  std::vector<double> partial_sums(blocks);
  std::uint32_t non_finite = 0;

#pragma omp parallel for schedule(static) reduction(| : non_finite)
  for (std::uint64_t b = 0; b < blocks; ++b) {
    thread_sums sums;
    for (std::uint64_t c = b * per_block; c < table.chunk_count && c < (b + 1) * per_block; ++c) {
      const chunk_descriptor chunk = table.chunks[c];
      const tensor_descriptor& tensor = table.tensors[chunk.tensor];
      const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
      const std::uint64_t remaining = tensor.numel - begin;
      const std::uint64_t count = remaining < chunk_elements ? remaining : chunk_elements;
      non_finite |= loops.add_squares(tensor, begin, count, sums);
    }
    thread_totals totals;
    for (int thread = 0; thread < static_cast<int>(statistics_threads); ++thread) {
      totals.value[thread] =
          math::total({sums.small[thread], sums.medium[thread], sums.large[thread]});
    }
    partial_sums[b] = reduce_over_block(totals);
  }

  thread_totals totals;
  for (std::uint64_t b = 0; b < blocks; ++b) {
    totals.value[b % statistics_threads] += partial_sums[b];
  }
  return {reduce_over_block(totals), non_finite, 1};
}

}  // namespace stepgraph::host
