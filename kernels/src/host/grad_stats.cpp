#include <algorithm>
#include <bit>
#include <vector>

#include "chunk_loops.hpp"
#include "stepgraph/kernels/host_loops.hpp"
#include "stepgraph/math/gradient_norm.hpp"

// Adds in the order of grad_stats.cu, written there: per position in a run of 16 bytes, then per
// thread, then by halving distances over the warp, over the warps, and over the blocks.
namespace stepgraph::host {
namespace {

/// What one block of the kernel finds in its chunks.
struct partial_statistics {
  double total = 0.0;  ///< sum of squares or largest magnitude
  std::uint32_t zeros = 0;
};

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

partial_statistics measure(const statistics_table_view& table, const statistics_options& options,
                           std::uint64_t block) {
  const chunk_loops& loops = fastest_chunk_loops();
  const std::uint64_t per_block = chunks_per_statistics_block(table.chunk_count);
  thread_statistics found;
  for (std::uint64_t c = block * per_block; c < table.chunk_count && c < (block + 1) * per_block;
       ++c) {
    const chunk_descriptor chunk = table.chunks[c];
    if (chunk.tensor == no_tensor) continue;
    const tensor_descriptor& tensor = table.tensors[chunk.tensor];
    const auto [begin, count] = elements_of(chunk, tensor);
    loops.add_gradients(tensor, begin, count, options, found);
  }
  partial_statistics partial;
  partial.zeros = found.zeros;
  if (options.norm == norm_kind::infinity) {
    partial.total = static_cast<double>(std::bit_cast<float>(found.largest));
  } else {
    thread_totals totals;
    std::copy_n(found.sum, statistics_threads, totals.value);
    partial.total = reduce_over_block(totals);
  }
  return partial;
}

}  // namespace

gradient_statistics grad_stats(const statistics_table_view& table,
                               const statistics_options& options, double* totals) {
  const std::uint64_t blocks = statistics_blocks(table.chunk_count);
  std::vector<partial_statistics> partials(blocks);
#pragma omp parallel for schedule(static)
  for (std::uint64_t block = 0; block < blocks; ++block) {
    partials[block] = measure(table, options, block);
  }

  gradient_statistics statistics;
  statistics.measured = 1;
  std::uint64_t begin = 0;
  for (std::uint32_t group = 0; group < table.norm_group_count; ++group) {
    const std::uint64_t end = table.norm_group_count == 1 ? blocks : table.norm_group_ends[group];
    thread_totals sums;
    double largest = 0.0;
    for (std::uint64_t b = begin; b < end; ++b) {
      sums.value[(b - begin) % statistics_threads] += partials[b].total;
      largest = math::larger_total(largest, partials[b].total);
      statistics.zeros += partials[b].zeros;
    }
    totals[group] = options.norm == norm_kind::infinity ? largest : reduce_over_block(sums);
    begin = end;
  }
  statistics.total = math::combined_total(totals, table.norm_group_count, options.norm);
  return statistics;
}

}  // namespace stepgraph::host
