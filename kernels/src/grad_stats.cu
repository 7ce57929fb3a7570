#include "advance_step_block.cuh"
#include "dependent_launch.cuh"
#include "gradient_chunks.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"

// The order of summation is part of the contract: src/host/grad_stats.cpp adds the same numbers in
// the same order, so the norm has one bit pattern everywhere and on every replay.
namespace stepgraph::cuda {
namespace {

constexpr int threads = statistics_threads;
constexpr int warps = threads / 32;
static_assert(threads == prepare_threads);

/// Adds over the block: within warps by halving distances, then over the warps likewise. Valid in
/// every thread. A second call needs a barrier between.
template <norm_kind Norm, bool CountZeros>
__device__ message_payload reduce_over_block(message_payload mine) {
  constexpr std::uint32_t everyone = 0xffffffffu;
  __shared__ double warp_totals[warps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine.total =
        math::joined_total(Norm, mine.total, __shfl_down_sync(everyone, mine.total, distance));
  }
  if (threadIdx.x % 32 == 0) warp_totals[threadIdx.x / 32] = mine.total;
  __shared__ std::uint64_t warp_zeros[warps];
  if constexpr (CountZeros) {
    // In two parts, whose sums fit below 2^48.
    const std::uint32_t low =
        __reduce_add_sync(everyone, static_cast<std::uint32_t>(mine.zeros & 0xffffu));
    const std::uint32_t high =
        __reduce_add_sync(everyone, static_cast<std::uint32_t>(mine.zeros >> 16));
    if (threadIdx.x % 32 == 0) {
      warp_zeros[threadIdx.x / 32] = (static_cast<std::uint64_t>(high) << 16) + low;
    }
  }
  __syncthreads();
  double totals[warps];
  message_payload result;
#pragma unroll
  for (int warp = 0; warp < warps; ++warp) {
    totals[warp] = warp_totals[warp];
    if constexpr (CountZeros) result.zeros += warp_zeros[warp];
  }
#pragma unroll
  for (int distance = warps / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int warp = 0; warp < distance; ++warp) {
      totals[warp] = math::joined_total(Norm, totals[warp], totals[warp + distance]);
    }
  }
  result.total = totals[0];
  return result;
}

/// Reads the gradients of block number `number` and sends what it found.
template <norm_kind Norm, bool CountZeros>
__device__ __forceinline__ void measure(const statistics_table_view& table, std::uint32_t number,
                                        const step_block_view& block, block_message* messages) {
  __shared__ staged_chunks staged;
  const std::uint32_t tag = message_tag(*block.scalars);
  thread_statistics<Norm, CountZeros> found;
  if (chunks_per_statistics_block(table.chunk_count) != 1) {
    let_successors_start();
    stage_chunks(table, number, staged);
    add_staged(staged, found);
  } else {
    if (table.chunk_count != 0) add_chunk(describe(table, number), found);
    // Not earlier: of a short list all gradients are under way together, and the operands of the
    // update, four times as many bytes, would hold them up.
    let_successors_start();
  }
  const double total =
      Norm == norm_kind::l2 ? found.sum : static_cast<double>(__uint_as_float(found.largest));
  const message_payload whole = reduce_over_block<Norm, CountZeros>({total, found.zeros});
  if (threadIdx.x == 0) send<CountZeros>(messages + number, tag, whole);
}

/// Waits for what the other blocks found and adds it up, valid in every thread. The totals of the
/// norm groups go to `totals`, by thread 0.
template <norm_kind Norm, bool CountZeros>
__device__ __forceinline__ gradient_statistics gather(const statistics_table_view& table,
                                                      const block_message* messages,
                                                      std::uint32_t tag, double* totals) {
  gradient_statistics all;
  all.measured = 1;
  std::uint32_t begin = 0;
  for (std::uint32_t group = 0; group < table.norm_group_count; ++group) {
    const std::uint32_t end = table.norm_group_count == 1 ? statistics_blocks(table.chunk_count)
                                                          : table.norm_group_ends[group];
    message_payload mine;
    for (std::uint32_t i = begin + threadIdx.x; i < end; i += threads) {
      const message_payload partial = receive<CountZeros>(messages + i, tag);
      mine.total = math::joined_total(Norm, mine.total, partial.total);
      mine.zeros += partial.zeros;
    }
    if (group != 0) __syncthreads();
    const message_payload whole = reduce_over_block<Norm, CountZeros>(mine);
    if (threadIdx.x == 0) totals[group] = whole.total;
    all.total = math::joined_total(Norm, all.total, whole.total);
    all.zeros += whole.zeros;
    begin = end;
  }
  return all;
}

/// The first blocks prepare the step while the others read the gradients; block 0 waits for all of
/// them and finishes it.
template <norm_kind Norm, bool CountZeros>
__global__ void __launch_bounds__(threads, 4)
    grad_stats_kernel(statistics_table_view table, block_message* messages, step_block_view block,
                      const __grid_constant__ settings_batch settings) {
  __shared__ advance_memory memory;
  wait_for_predecessors();
  const std::uint32_t preparing = prepare_blocks(block.group_count);
  block_message* const found = messages + preparing - 1;
  if (blockIdx.x >= preparing) {
    measure<Norm, CountZeros>(table, blockIdx.x - preparing, block, found);
    return;
  }
  let_successors_start();
  if (blockIdx.x != 0) {
    prepare_groups_for_block_0(block, settings, messages, memory);
    return;
  }
  const advance_inputs inputs = prepare_step_in_block(block, settings, 0, memory);
  const std::uint32_t tag = message_tag(memory.scalars());
  __shared__ double totals[max_norm_groups];
  const gradient_statistics statistics = gather<Norm, CountZeros>(table, found, tag, totals);
  if (table.norm_group_count > 1) __syncthreads();
  finish_step_in_block(
      block, settings, statistics, [&](std::uint32_t i) { return totals[i]; }, inputs, messages,
      memory);
}

template <norm_kind Norm, bool CountZeros>
__global__ void __launch_bounds__(threads, 4)
    grad_totals_kernel(statistics_table_view table, block_message* messages, step_block_view block,
                       double* totals) {
  wait_for_predecessors();
  block_message* const found = messages + prepare_blocks(block.group_count) - 1;
  if (blockIdx.x != 0) {
    measure<Norm, CountZeros>(table, blockIdx.x - 1, block, found);
    return;
  }
  let_successors_start();
  const gradient_statistics all =
      gather<Norm, CountZeros>(table, found, message_tag(*block.scalars), totals);
  if (threadIdx.x == 0) totals[table.norm_group_count] = static_cast<double>(all.zeros);
}

/// Calls `body` with the options as template arguments.
template <class Body>
cudaError_t with_options(const statistics_options& options, Body&& body) {
  using l2 = std::integral_constant<norm_kind, norm_kind::l2>;
  using infinity = std::integral_constant<norm_kind, norm_kind::infinity>;
  if (options.norm == norm_kind::l2) {
    return options.count_zeros ? body(l2{}, std::true_type{}) : body(l2{}, std::false_type{});
  }
  return options.count_zeros ? body(infinity{}, std::true_type{})
                             : body(infinity{}, std::false_type{});
}

}  // namespace

cudaError_t launch_grad_stats(const statistics_table_view& table, const statistics_options& options,
                              block_message* messages, const step_block_view& block,
                              const settings_batch& settings, launch_order order,
                              cudaStream_t stream) {
  return with_options(options, [&](auto norm, auto zeros) {
    return launch(grad_stats_kernel<norm.value, zeros.value>,
                  statistics_blocks(table.chunk_count) + prepare_blocks(block.group_count), threads,
                  order, stream, table, messages, block, settings);
  });
}

cudaError_t launch_grad_totals(const statistics_table_view& table,
                               const statistics_options& options, block_message* messages,
                               const step_block_view& block, double* totals, launch_order order,
                               cudaStream_t stream) {
  return with_options(options, [&](auto norm, auto zeros) {
    return launch(grad_totals_kernel<norm.value, zeros.value>,
                  statistics_blocks(table.chunk_count) + 1, threads, order, stream, table, messages,
                  block, totals);
  });
}

}  // namespace stepgraph::cuda
