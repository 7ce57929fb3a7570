#include "advance_step_block.cuh"
#include "dependent_launch.cuh"
#include "operand_formats.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"
#include "stepgraph/math/gradient_norm.hpp"

// The order of summation is part of the contract: src/host/grad_stats.cpp adds the same numbers in
// the same order, so the norm has one bit pattern everywhere and on every replay.
namespace stepgraph::cuda {
namespace {

constexpr int threads = statistics_threads;
constexpr int warps = threads / 32;
static_assert(threads == prepare_threads);

/// What one thread has found so far.
template <norm_kind Norm, bool CountZeros>
struct thread_statistics {
  double sum = 0.0;
  std::uint32_t largest = 0;  ///< magnitude bits
  std::uint32_t zeros = 0;

  /// Takes back zeros that stand for elements that do not exist.
  __device__ __forceinline__ void count_no_zeros(int elements) {
    if constexpr (CountZeros) zeros -= static_cast<std::uint32_t>(elements);
  }

  /// Adds one run of Width elements of every pass. The thread keeps one sum for each position in
  /// the run; element e of the chunk thus belongs to sum e % (threads * Width).
  template <int Width, int Passes, class Operand>
  __device__ __forceinline__ void add(const Operand& operand,
                                      const stored_bits<Width> (&bits)[Passes]) {
    double sums[Width] = {};
#pragma unroll
    for (int pass = 0; pass < Passes; ++pass) {
      const float_pack<Width> gradient = operand.decode(bits[pass]);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        if constexpr (Norm == norm_kind::l2) {
          math::add_square(sums[i], gradient.value[i]);
        } else {
          largest = max(largest, math::magnitude_bits(gradient.value[i]));
        }
        if constexpr (CountZeros) zeros += gradient.value[i] == 0.0f ? 1u : 0u;
      }
    }
    if constexpr (Norm == norm_kind::l2) {
#pragma unroll
      for (int distance = Width / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int i = 0; i < distance; ++i) sums[i] += sums[i + distance];
      }
      sum += sums[0];
    }
  }
};

/// A chunk as every thread of the block needs it.
struct described_chunk {
  void* gradient;
  std::uint64_t begin;
  std::uint32_t count;
  storage_format format;
  bool aligned;
};

__device__ __forceinline__ described_chunk describe(const statistics_table_view& table,
                                                    std::uint64_t number) {
  described_chunk described = {nullptr, 0, 0, storage_format::f32, true};
  const chunk_descriptor chunk = table.chunks[number];
  if (chunk.tensor != no_tensor) {
    const tensor_descriptor& tensor = table.tensors[chunk.tensor];
    described.gradient = tensor.gradient;
    described.begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
    const std::uint64_t remaining = tensor.numel - described.begin;
    described.count =
        remaining < chunk_elements ? static_cast<std::uint32_t>(remaining) : chunk_elements;
    described.format = tensor.signature.gradient;
    described.aligned = reinterpret_cast<std::uintptr_t>(described.gradient) % 16 == 0;
  }
  return described;
}

/// The chunks of one block, in shared memory: their descriptors are read once, side by side, and
/// not one after the other between the gradients.
struct staged_chunks {
  described_chunk chunk[most_chunks_per_statistics_block];
  std::uint32_t count;
  bool alike;  ///< all are of one format
};

__device__ __forceinline__ void stage_chunks(const statistics_table_view& table,
                                             std::uint32_t block, staged_chunks& staged) {
  const std::uint32_t per_block = chunks_per_statistics_block(table.chunk_count);
  const std::uint64_t first = static_cast<std::uint64_t>(block) * per_block;
  const std::uint64_t left = table.chunk_count - first;
  const std::uint32_t count = left < per_block ? static_cast<std::uint32_t>(left) : per_block;
  if (threadIdx.x < 32) {
    bool alike = true;
    if (threadIdx.x < count) {
      const described_chunk mine = describe(table, first + threadIdx.x);
      staged.chunk[threadIdx.x] = mine;
      // Every thread of the mask takes part in the shuffle, whatever its chunk.
      const auto format = static_cast<int>(mine.format);
      alike = format == __shfl_sync((1u << count) - 1u, format, 0);
    }
    alike = __all_sync(0xffffffffu, alike);
    if (threadIdx.x == 0) {
      staged.count = count;
      staged.alike = alike;
    }
  }
  __syncthreads();
}

constexpr std::uint32_t chunks_in_flight = 4;

/// Adds `count` chunks of one format; `chunk_of(i)` is number i.
template <storage_format Format, class ChunkOf, class Statistics>
__device__ __forceinline__ void add_chunks(ChunkOf&& chunk_of, std::uint32_t count,
                                           Statistics& statistics) {
  constexpr int width = 16 / sizeof(typename math::format_traits<Format>::storage);
  constexpr int passes = chunk_elements / (threads * width);
  struct fetched_chunk {
    stored_bits<width> bits[passes];
  };
  const auto offset_of = [](int pass) {
    return (pass * threads + static_cast<int>(threadIdx.x)) * width;
  };
  // Elements that do not exist read as zeros, which neither sums nor magnitudes notice.
  const auto fetch = [&](const described_chunk& chunk) {
    const plain_operand<Format> operand{chunk.gradient};
    fetched_chunk fetched;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int exist = static_cast<int>(chunk.count) - offset_of(pass);
      const std::uint64_t at = chunk.begin + offset_of(pass);
      fetched.bits[pass] = chunk.aligned && exist >= width
                               ? operand.template fetch<width>(vector_access{at})
                               : operand.template fetch<width>(element_access{at, 1, exist});
    }
    return fetched;
  };
  const auto add = [&](const described_chunk& chunk, const fetched_chunk& fetched) {
    statistics.add(plain_operand<Format>{nullptr}, fetched.bits);
    if (chunk.count == chunk_elements) return;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int exist = static_cast<int>(chunk.count) - offset_of(pass);
      statistics.count_no_zeros(exist <= 0 ? width : exist < width ? width - exist : 0);
    }
  };
  // Several chunks are on their way together: what is in flight decides the bandwidth.
  for (std::uint32_t first = 0; first < count; first += chunks_in_flight) {
    fetched_chunk fetched[chunks_in_flight];
#pragma unroll
    for (std::uint32_t i = 0; i < chunks_in_flight; ++i) {
      if (first + i < count) fetched[i] = fetch(chunk_of(first + i));
    }
#pragma unroll
    for (std::uint32_t i = 0; i < chunks_in_flight; ++i) {
      if (first + i < count) add(chunk_of(first + i), fetched[i]);
    }
  }
}

template <class ChunkOf, class Statistics>
__device__ __forceinline__ void add_chunks(storage_format format, ChunkOf&& chunk_of,
                                           std::uint32_t count, Statistics& statistics) {
  table_format(format).visit<storage_format::f32, storage_format::f16, storage_format::bf16>(
      [&](auto known) { add_chunks<known.value>(chunk_of, count, statistics); });
}

template <class Statistics>
__device__ __forceinline__ void add_chunk(const described_chunk& chunk, Statistics& statistics) {
  add_chunks(
      chunk.format, [&](std::uint32_t) { return chunk; }, 1, statistics);
}

template <class Statistics>
__device__ __forceinline__ void add_staged(const staged_chunks& staged, Statistics& statistics) {
  if (staged.alike) {
    add_chunks(
        staged.chunk[0].format,
        [&](std::uint32_t i) -> const described_chunk& { return staged.chunk[i]; }, staged.count,
        statistics);
    return;
  }
  for (std::uint32_t c = 0; c < staged.count; ++c) add_chunk(staged.chunk[c], statistics);
}

/// What two parts of the gradients amount to.
template <norm_kind Norm>
__device__ __forceinline__ double joined(double a, double b) {
  return Norm == norm_kind::l2 ? a + b : math::larger_total(a, b);
}

/// Adds over the block: within warps by halving distances, then over the warps likewise. Valid in
/// every thread. A second call needs a barrier between.
template <norm_kind Norm>
__device__ message_payload reduce_over_block(message_payload mine) {
  __shared__ double warp_totals[warps];
  __shared__ std::uint32_t warp_zeros[warps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine.total = joined<Norm>(mine.total, __shfl_down_sync(0xffffffffu, mine.total, distance));
  }
  mine.zeros = __reduce_add_sync(0xffffffffu, mine.zeros);
  if (threadIdx.x % 32 == 0) {
    warp_totals[threadIdx.x / 32] = mine.total;
    warp_zeros[threadIdx.x / 32] = mine.zeros;
  }
  __syncthreads();
  double totals[warps];
  message_payload result;
#pragma unroll
  for (int warp = 0; warp < warps; ++warp) {
    totals[warp] = warp_totals[warp];
    result.zeros += warp_zeros[warp];
  }
#pragma unroll
  for (int distance = warps / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int warp = 0; warp < distance; ++warp) {
      totals[warp] = joined<Norm>(totals[warp], totals[warp + distance]);
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
  const std::uint32_t tag = message_tag(block);
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
  message_payload mine;
  mine.total =
      Norm == norm_kind::l2 ? found.sum : static_cast<double>(__uint_as_float(found.largest));
  mine.zeros = found.zeros;
  const message_payload whole = reduce_over_block<Norm>(mine);
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
      mine.total = joined<Norm>(mine.total, partial.total);
      mine.zeros += partial.zeros;
    }
    if (group != 0) __syncthreads();
    const message_payload whole = reduce_over_block<Norm>(mine);
    if (threadIdx.x == 0) totals[group] = whole.total;
    all.total = joined<Norm>(all.total, whole.total);
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
  const std::uint32_t tag = tag_of_launch(memory.scalars().launches + 1);
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
      gather<Norm, CountZeros>(table, found, message_tag(block), totals);
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
