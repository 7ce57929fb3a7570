#pragma once

#include "dependent_launch.cuh"
#include "stepgraph/kernels/launch_shape.hpp"
#include "stepgraph/math/adam.hpp"
#include "update_operands.cuh"
#include "write_record.cuh"

/// The update: a few blocks a chunk, one body for every signature.
namespace stepgraph::cuda {

/// What a block needs to know of the step, beside its operands.
struct block_terms {
  math::adam_terms adam;
  std::uint64_t step;
  bool skip;
};

/// 16 bytes of global memory, read here and now: the compiler keeps several such accesses together.
/// The assembler may still sink one into a branch; a test on the disassembly sees it.
__device__ __forceinline__ uint4 load_16_bytes_now(const void* address) {
  uint4 words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address));
  return words;
}

/// Where the terms of a step come from: the step block, which the device itself keeps.
struct terms_in_memory {
  step_block_view block;

  __device__ block_terms read(std::uint32_t group) const {
    const uint4 step = load_16_bytes_now(block.scalars);
    const auto* terms = reinterpret_cast<const uint4*>(block.terms + group);
    const uint4 low = load_16_bytes_now(terms);
    const uint4 high = load_16_bytes_now(terms + 1);
    static_assert(sizeof(math::adam_terms) == 2 * sizeof(uint4));
    static_assert(offsetof(step_scalars, step) == 0 && offsetof(step_scalars, skip) == 8);
    block_terms result;
    result.adam = {__uint_as_float(low.x),  __uint_as_float(low.y),  __uint_as_float(low.z),
                   __uint_as_float(low.w),  __uint_as_float(high.x), __uint_as_float(high.y),
                   __uint_as_float(high.z), __uint_as_float(high.w)};
    result.step = static_cast<std::uint64_t>(step.y) << 32 | step.x;
    result.skip = step.z != 0;
    return result;
  }

  /// By one block.
  __device__ void write_record() const {
    wait_for_predecessors();
    write_record_in_block(block);
  }
};

/// The operands of a few elements, as they were stored.
template <int Width>
struct fetched_operands {
  stored_bits<Width> gradient;
  stored_bits<Width> weight;
  stored_bits<Width> exp_avg;
  stored_bits<Width> exp_avg_sq;
  stored_bits<Width> max_exp_avg_sq;
};

template <int Width, class Operands, class Access>
__device__ __forceinline__ fetched_operands<Width> fetch_operands(const Operands& operands,
                                                                  Access at) {
  fetched_operands<Width> fetched;
  fetched.gradient = operands.template fetch_gradient<Width>(at);
  fetched.weight = operands.template fetch_weight<Width>(at);
  fetched.exp_avg = operands.first_moment().template fetch<Width>(at);
  fetched.exp_avg_sq = operands.second_moment().template fetch<Width>(at);
  fetched.max_exp_avg_sq = operands.largest_second_moment().template fetch<Width>(at);
  return fetched;
}

/// Decodes, updates and stores a few elements, the gradient too if it is to be left unscaled;
/// returns the largest magnitude among the new weights if the parameter is FP8, else 0.
template <int Width, class Operands, class Access>
__device__ __forceinline__ float update_pack(const Operands& operands,
                                             const math::adam_terms& terms,
                                             const math::rounding_source& rounding,
                                             gradient_store gradients, Access at,
                                             const fetched_operands<Width>& fetched) {
  const float_pack<Width> gradient = operands.decode_gradient(fetched.gradient);
  if (gradients == gradient_store::unscaled) {
    operands.store_gradient(at, scaled(gradient, fabsf(terms.gradient_scale)));
  }
  float_pack<Width> weight = operands.decode_weight(fetched.weight);
  float_pack<Width> exp_avg = operands.first_moment().decode(fetched.exp_avg);
  float_pack<Width> exp_avg_sq = operands.second_moment().decode(fetched.exp_avg_sq);
  float_pack<Width> maximum = operands.largest_second_moment().decode(fetched.max_exp_avg_sq);
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    math::adam_update(terms, operands.has_maximum(), gradient.value[i], weight.value[i],
                      exp_avg.value[i], exp_avg_sq.value[i], maximum.value[i]);
  }
  operands.store_weight(at, weight, rounding);
  operands.first_moment().store(at, exp_avg);
  operands.second_moment().store(at, exp_avg_sq);
  operands.largest_second_moment().store(at, maximum);

  float largest = 0.0f;
  if (operands.has_fp8_parameter()) {
#pragma unroll
    for (int i = 0; i < Width; ++i) largest = math::larger_magnitude(largest, weight.value[i]);
  }
  return largest;
}

/// Zeros that exist only once `loaded` does: a store that meets the load of what it replaces holds
/// up the memory, and a step whose gradients were not in the cache took twice as long.
template <int Width>
__device__ __forceinline__ float_pack<Width> zeros_after(const stored_bits<Width>& loaded) {
  // 0 in a grid of one dimension, which only the device knows.
  const float zero = __uint_as_float(loaded.word[0] & blockIdx.z);
  float_pack<Width> zeros;
#pragma unroll
  for (int i = 0; i < Width; ++i) zeros.value[i] = zero;
  return zeros;
}

/// Updates `Packs` times `Width` elements and returns the largest magnitude among the new weights
/// of an FP8 parameter (as f32 bits; else 0). All loads are issued before the first store, so that
/// they overlap although the compiler must assume that stores may alias them.
template <int Width, int Packs, class Operands, class Terms, class AccessOf>
__device__ __forceinline__ std::uint32_t update_packs(const Operands& operands, const Terms& source,
                                                      const update_options& options,
                                                      std::uint32_t tensor_index,
                                                      AccessOf&& access_of) {
  fetched_operands<Width> fetched[Packs];
#pragma unroll
  for (int pack = 0; pack < Packs; ++pack) {
    fetched[pack] = fetch_operands<Width>(operands, access_of(pack));
  }
  // The operands are in flight while the step's scalars are still being computed: nothing above
  // depends on another kernel of this step.
  wait_for_predecessors();
  const block_terms terms = source.read(operands.tensor.group);
  if (options.gradients == gradient_store::zero) {
    // Of a skipped step too. While the terms are on their way, so that these stores are too.
#pragma unroll
    for (int pack = 0; pack < Packs; ++pack) {
      operands.store_gradient(access_of(pack), zeros_after<Width>(fetched[pack].gradient));
    }
  }
  float largest = 0.0f;
  if (!terms.skip) {
    const math::rounding_source rounding = {options.stochastic_rounding, options.seed, terms.step,
                                            tensor_index};
#pragma unroll
    for (int pack = 0; pack < Packs; ++pack) {
      largest = math::larger_magnitude(
          largest, update_pack(operands, terms.adam, rounding, options.gradients, access_of(pack),
                               fetched[pack]));
    }
  }
  return math::float_bits(largest);
}

/// Publishes what an FP8 parameter owes its scaling recipe: amax and scale_inv.
template <class Operands>
__device__ __forceinline__ void publish_fp8_scaling(const Operands& operands, std::uint32_t largest,
                                                    const chunk_descriptor& chunk, bool first_block,
                                                    std::uint32_t* arrivals) {
  __shared__ std::uint32_t block_largest;
  if (threadIdx.x == 0) block_largest = 0;
  __syncthreads();
  const std::uint32_t warp_largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&block_largest, warp_largest);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const fp8_scaling& scaling = operands.tensor.parameter_scaling;
  // Magnitudes are ordered as their bits. Most blocks find a larger value there already.
  auto* amax = reinterpret_cast<unsigned int*>(scaling.amax);
  if (block_largest > __ldcg(amax)) atomicMax(amax, block_largest);
  // Without a master every block reads the old scale_inv, so the last one to arrive replaces it;
  // the counter wraps to zero and is ready for the next step.
  bool replaces = first_block;
  if (!operands.has_master()) {
    constexpr std::uint64_t elements = chunk_elements / update_blocks_per_chunk;
    const auto last =
        static_cast<unsigned int>((operands.tensor.numel + elements - 1) / elements - 1);
    replaces = atomicInc(&arrivals[chunk.tensor], last) == last;
  }
  if (replaces) *scaling.scale_inv = 1.0f / *scaling.scale;
}

/// One block a run of a chunk: loads its chunk and tensor descriptors once, its group's terms once,
/// and touches every element once. Whole chunks of aligned tensors move 16 bytes an access, the
/// rest moves an element an access. One block more writes the step's record.
template <class Formats, class Terms>
__global__ void __launch_bounds__(update_threads, Formats::least_blocks)
    update_kernel(tensor_table_view table, Terms source, update_options options) {
  constexpr int threads = update_threads;
  constexpr int width = Formats::width;
  constexpr int elements = chunk_elements / update_blocks_per_chunk;
  constexpr int packs = elements / (threads * width);
  static_assert(packs * threads * width == elements);

  let_successors_start();
  // From the last chunk to the first: the gradients that grad_stats read last are still in the
  // cache.
  const std::uint32_t block = gridDim.x - 1 - blockIdx.x;
  // The first to start: the record is on its way over the bus while the others update.
  if (block == table.chunk_count * update_blocks_per_chunk) {
    source.write_record();
    return;
  }
  const chunk_descriptor chunk = table.chunks[block / update_blocks_per_chunk];
  const tensor_descriptor tensor = table.tensors[chunk.tensor];
  const typename Formats::operands operands(tensor);
  const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements +
                              block % update_blocks_per_chunk * elements;
  if (begin >= tensor.numel) return;
  const std::uint64_t remaining = tensor.numel - begin;
  std::uint32_t largest = 0;

  if (tensor.vectorizable && remaining >= elements) {
    largest = update_packs<width, packs>(operands, source, options, chunk.tensor, [&](int pack) {
      return vector_access{begin + (pack * threads + threadIdx.x) * width};
    });
  } else {
    // Pack by pack: few registers matter more here than accesses in flight.
    const int count = remaining < elements ? static_cast<int>(remaining) : elements;
    std::uint32_t largest_so_far = 0;
#pragma unroll 1
    for (int pack = 0; pack < packs; ++pack) {
      const std::uint32_t largest_of_pack =
          update_packs<width, 1>(operands, source, options, chunk.tensor, [&](int) {
            if constexpr (Formats::consecutive) {
              const int offset = (pack * threads + static_cast<int>(threadIdx.x)) * width;
              return element_access{begin + offset, 1, count - offset};
            } else {
              // Neighbouring threads touch neighbouring elements.
              const int offset = pack * width * threads + static_cast<int>(threadIdx.x);
              const int left = count - offset;
              return element_access{begin + offset, threads,
                                    left <= 0 ? 0 : (left + threads - 1) / threads};
            }
          });
      largest_so_far = max(largest_so_far, largest_of_pack);
    }
    largest = largest_so_far;
  }
  if (operands.has_fp8_parameter()) {
    // Nothing is published for a skipped step. Read again, so that the flag need not be kept.
    if (!source.read(tensor.group).skip) {
      publish_fp8_scaling(operands, largest, chunk, begin == 0, table.arrivals);
    }
  }
}

}  // namespace stepgraph::cuda
