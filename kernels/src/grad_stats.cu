#include "advance_step_block.cuh"
#include "dependent_launch.cuh"
#include "operand_formats.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"
#include "stepgraph/math/sum_of_squares.hpp"

// The order of summation is part of the contract: src/host/grad_stats.cpp adds the same numbers in
// the same order, so the norm has one bit pattern everywhere and on every replay.
namespace stepgraph::cuda {
namespace {

constexpr int threads = statistics_threads;
constexpr int warps = threads / 32;

struct block_statistics {
  double sum;
  std::uint32_t non_finite;
};

/// Adds over the block: within warps by halving distances, then over the warps likewise. Valid in
/// thread 0.
__device__ block_statistics reduce_over_block(block_statistics mine) {
  __shared__ double warp_sums[warps];
  __shared__ std::uint32_t warp_flags[warps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine.sum += __shfl_down_sync(0xffffffffu, mine.sum, distance);
  }
  const std::uint32_t flag = __any_sync(0xffffffffu, mine.non_finite != 0) ? 1u : 0u;
  if (threadIdx.x % 32 == 0) {
    warp_sums[threadIdx.x / 32] = mine.sum;
    warp_flags[threadIdx.x / 32] = flag;
  }
  __syncthreads();
  block_statistics result = {0.0, 0};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int distance = warps / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int warp = 0; warp < distance; ++warp) warp_sums[warp] += warp_sums[warp + distance];
    }
    for (int warp = 0; warp < warps; ++warp) result.non_finite |= warp_flags[warp];
    result.sum = warp_sums[0];
  }
  __syncthreads();
  return result;
}

/// One thread's share of one chunk. The thread owns runs of `Width` consecutive elements, 16 bytes
/// each, and keeps one sum for each position in the run; element e of the chunk thus belongs to
/// sum e % (threads * Width).
template <storage_format Format>
__device__ __forceinline__ math::scaled_sum add_chunk(const tensor_descriptor& tensor,
                                                      std::uint64_t begin, int count,
                                                      std::uint32_t& non_finite) {
  constexpr int width = 16 / sizeof(typename math::format_traits<Format>::storage);
  constexpr int passes = chunk_elements / (threads * width);
  const plain_operand<Format> operand{tensor.gradient};

  stored_bits<width> bits[passes];
  const bool whole = tensor.vectorizable && count == static_cast<int>(chunk_elements);
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const int offset = (pass * threads + static_cast<int>(threadIdx.x)) * width;
    bits[pass] =
        whole ? operand.template fetch<width>(vector_access{begin + offset})
              : operand.template fetch<width>(element_access{begin + offset, 1, count - offset});
  }
  math::scaled_sum sums[width] = {};
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const float_pack<width> gradient = operand.decode(bits[pass]);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      math::add_square(sums[i], gradient.value[i]);
      non_finite |= math::is_finite(gradient.value[i]) ? 0u : 1u;
    }
  }
#pragma unroll
  for (int distance = width / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < distance; ++i) sums[i] = sums[i] + sums[i + distance];
  }
  return sums[0];
}

__device__ __forceinline__ math::scaled_sum add_chunk(const tensor_descriptor& tensor,
                                                      std::uint64_t begin, int count,
                                                      std::uint32_t& non_finite) {
  math::scaled_sum sum;
  table_format(tensor.signature.gradient)
      .visit<storage_format::f32, storage_format::f16, storage_format::bf16>(
          [&](auto format) { sum = add_chunk<format.value>(tensor, begin, count, non_finite); });
  return sum;
}

__global__ void __launch_bounds__(threads)
    grad_stats_kernel(tensor_table_view table, grad_stats_workspace workspace,
                      step_block_view block, settings_batch settings) {
  let_successors_start();
  wait_for_predecessors();

  const std::uint32_t per_block = chunks_per_statistics_block(table.chunk_count);
  const std::uint64_t first = static_cast<std::uint64_t>(blockIdx.x) * per_block;
  const std::uint64_t last =
      first + per_block < table.chunk_count ? first + per_block : table.chunk_count;
  math::scaled_sum sum;
  block_statistics mine = {0.0, 0};
  for (std::uint64_t c = first; c < last; ++c) {
    const chunk_descriptor chunk = table.chunks[c];
    const tensor_descriptor tensor = table.tensors[chunk.tensor];
    const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
    const std::uint64_t remaining = tensor.numel - begin;
    const int count =
        remaining < chunk_elements ? static_cast<int>(remaining) : static_cast<int>(chunk_elements);
    sum = sum + add_chunk(tensor, begin, count, mine.non_finite);
  }
  mine.sum = math::total(sum);
  const block_statistics partial = reduce_over_block(mine);

  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    workspace.sums[blockIdx.x] = partial.sum;
    workspace.non_finite[blockIdx.x] = partial.non_finite;
    __threadfence();
    // atomicInc wraps to zero at the last arrival, which leaves the counter ready for the next
    // replay.
    is_last = atomicInc(workspace.arrivals, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;

  __threadfence();
  mine = {0.0, 0};
  for (std::uint32_t i = threadIdx.x; i < gridDim.x; i += threads) {
    mine.sum += __ldcg(workspace.sums + i);
    mine.non_finite |= __ldcg(workspace.non_finite + i);
  }
  __shared__ gradient_statistics statistics;
  const block_statistics whole = reduce_over_block(mine);
  if (threadIdx.x == 0) statistics = {whole.sum, whole.non_finite, 1};
  __syncthreads();
  advance_step_in_block(block, settings, statistics);
}

}  // namespace

cudaError_t launch_grad_stats(const tensor_table_view& table, const grad_stats_workspace& workspace,
                              const step_block_view& block, const settings_batch& settings,
                              launch_order order, cudaStream_t stream) {
  return launch(grad_stats_kernel, statistics_blocks(table.chunk_count), threads, order, stream,
                table, workspace, block, settings);
}

}  // namespace stepgraph::cuda
