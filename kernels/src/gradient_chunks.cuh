#pragma once

#include "operand_formats.cuh"
#include "stepgraph/kernels/launch_shape.hpp"
#include "stepgraph/kernels/step_block.hpp"
#include "stepgraph/math/gradient_norm.hpp"

/// How the threads of a block read gradients, chunk by chunk, and what each finds in them.
namespace stepgraph::cuda {

/// What one thread has found so far.
template <norm_kind Norm, bool CountZeros>
struct thread_statistics {
  double sum = 0.0;
  std::uint32_t largest = 0;  ///< magnitude bits
  std::uint32_t zeros = 0;

  /// For elements that do not exist and were read as zeros.
  __device__ __forceinline__ void take_back_zeros(int elements) {
    if constexpr (CountZeros) zeros -= static_cast<std::uint32_t>(elements);
  }

  /// Adds one run of Width elements of every pass. The thread keeps one sum for each position in
  /// the run; element e of the chunk thus belongs to sum e % (statistics_threads * Width).
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

/// A chunk as every thread of the block needs it; empty for one that names no tensor.
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
  constexpr int threads = statistics_threads;
  constexpr int width = 16 / sizeof(typename math::format_traits<Format>::storage);
  constexpr int passes = chunk_elements / (threads * width);
  struct fetched_chunk {
    stored_bits<width> bits[passes];
  };
  const auto offset_of = [](int pass) {
    return (pass * threads + static_cast<int>(threadIdx.x)) * width;
  };
  // Elements from there to the end of the chunk; 0 and less: none.
  const auto left_of = [&](const described_chunk& chunk, int pass) {
    return static_cast<int>(chunk.count) - offset_of(pass);
  };
  // Elements that do not exist read as zeros, which neither sums nor magnitudes notice.
  const auto fetch = [&](const described_chunk& chunk) {
    const plain_operand<Format> operand{chunk.gradient};
    fetched_chunk fetched;
    // One branch for a whole chunk, so that its loads stand together.
    if (chunk.aligned && chunk.count == chunk_elements) {
#pragma unroll
      for (int pass = 0; pass < passes; ++pass) {
        fetched.bits[pass] =
            operand.template fetch<width>(vector_access{chunk.begin + offset_of(pass)});
      }
      return fetched;
    }
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int left = left_of(chunk, pass);
      const std::uint64_t at = chunk.begin + offset_of(pass);
      fetched.bits[pass] = chunk.aligned && left >= width
                               ? operand.template fetch<width>(vector_access{at})
                               : operand.template fetch<width>(element_access{at, 1, left});
    }
    return fetched;
  };
  const auto add = [&](const described_chunk& chunk, const fetched_chunk& fetched) {
    statistics.add(plain_operand<Format>{nullptr}, fetched.bits);
    if (chunk.count == chunk_elements) return;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      statistics.take_back_zeros(min(max(width - left_of(chunk, pass), 0), width));
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

}  // namespace stepgraph::cuda
