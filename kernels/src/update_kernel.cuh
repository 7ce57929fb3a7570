#pragma once

#include "dependent_launch.cuh"
#include "stepgraph/kernels/launch_shape.hpp"
#include "stepgraph/math/adam.hpp"
#include "update_operands.cuh"

/// The update: one block a chunk, one body for every signature.
namespace stepgraph::cuda {

/// Where the terms of a step come from: the step block, which the device itself keeps.
struct terms_in_memory {
  step_block_view block;

  __device__ bool skip() const { return block.scalars->skip != 0; }
  __device__ std::uint64_t step() const { return block.scalars->step; }
  __device__ math::adam_terms terms_of(std::uint32_t group) const { return block.terms[group]; }
};

/// The operands of a few elements in registers.
template <int Width>
struct loaded_operands {
  float_pack<Width> weight;
  float_pack<Width> gradient;
  float_pack<Width> exp_avg;
  float_pack<Width> exp_avg_sq;
  float_pack<Width> max_exp_avg_sq;
};

template <int Width, class Operands, class Access>
__device__ __forceinline__ loaded_operands<Width> load_operands(const Operands& operands,
                                                                Access at) {
  loaded_operands<Width> loaded;
  loaded.gradient = operands.template load_gradient<Width>(at);
  loaded.weight = operands.template load_weight<Width>(at);
  loaded.exp_avg = operands.template load_exp_avg<Width>(at);
  loaded.exp_avg_sq = operands.template load_exp_avg_sq<Width>(at);
  loaded.max_exp_avg_sq = operands.template load_max_exp_avg_sq<Width>(at);
  return loaded;
}

template <int Width, class Operands, class Access>
__device__ __forceinline__ void store_operands(const Operands& operands, Access at,
                                               const loaded_operands<Width>& loaded,
                                               const math::rounding_source& source) {
  operands.store_weight(at, loaded.weight, source);
  operands.store_exp_avg(at, loaded.exp_avg);
  operands.store_exp_avg_sq(at, loaded.exp_avg_sq);
  operands.store_max_exp_avg_sq(at, loaded.max_exp_avg_sq);
}

template <int Width, class Operands>
__device__ __forceinline__ void update_in_registers(const Operands& operands,
                                                    const math::adam_terms& terms,
                                                    loaded_operands<Width>& loaded) {
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    math::adam_update(terms, operands.has_maximum(), loaded.gradient.value[i],
                      loaded.weight.value[i], loaded.exp_avg.value[i], loaded.exp_avg_sq.value[i],
                      loaded.max_exp_avg_sq.value[i]);
  }
}

/// Updates `Packs` times `Width` elements and returns the largest magnitude among the new weights
/// of an FP8 parameter (as f32 bits; else 0). All loads are issued before the first store, so that
/// they overlap although the compiler must assume that stores may alias them.
template <int Width, int Packs, class Operands, class Terms, class AccessOf>
__device__ __forceinline__ std::uint32_t update_packs(const Operands& operands, const Terms& source,
                                                      const update_options& options,
                                                      std::uint32_t tensor_index,
                                                      AccessOf&& access_of) {
  loaded_operands<Width> loaded[Packs];
#pragma unroll
  for (int pack = 0; pack < Packs; ++pack) {
    loaded[pack] = load_operands<Width>(operands, access_of(pack));
  }
  // The operands are in flight while the step's scalars are still being computed: nothing above
  // depends on another kernel of this step.
  wait_for_predecessors();
  float largest = 0.0f;
  if (!source.skip()) {
    const math::adam_terms terms = source.terms_of(operands.tensor.group);
    const math::rounding_source rounding = {options.stochastic_rounding, options.seed,
                                            source.step(), tensor_index};
#pragma unroll
    for (int pack = 0; pack < Packs; ++pack) {
      update_in_registers(operands, terms, loaded[pack]);
      store_operands(operands, access_of(pack), loaded[pack], rounding);
      if (operands.has_fp8_parameter()) {
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          largest = math::larger_magnitude(largest, loaded[pack].weight.value[i]);
        }
      }
    }
  }
  if (options.zero_gradients) {
#pragma unroll
    for (int pack = 0; pack < Packs; ++pack) {
      operands.template zero_gradient<Width>(access_of(pack));
    }
  }
  return math::float_bits(largest);
}

/// Publishes what an FP8 parameter owes its scaling recipe: amax and scale_inv.
template <class Operands>
__device__ __forceinline__ void publish_fp8_scaling(const Operands& operands, std::uint32_t largest,
                                                    const chunk_descriptor& chunk,
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
  bool replaces = chunk.index == 0;
  if (!operands.has_master()) {
    const auto last = static_cast<unsigned int>(chunk_count(operands.tensor.numel) - 1);
    replaces = atomicInc(&arrivals[chunk.tensor], last) == last;
  }
  if (replaces) *scaling.scale_inv = 1.0f / *scaling.scale;
}

/// One block a chunk: loads its chunk and tensor descriptors once, its group's terms once, and
/// touches every element once. Whole chunks of aligned tensors move 16 bytes an access, the rest
/// moves an element an access.
template <class Formats, class Terms>
__global__ void __launch_bounds__(update_threads)
    update_kernel(tensor_table_view table, Terms source, update_options options) {
  constexpr int threads = update_threads;
  constexpr int width = Formats::width;
  constexpr int packs = chunk_elements / (threads * width);
  static_assert(packs * threads * width == chunk_elements);

  let_successors_start();
  const chunk_descriptor chunk = table.chunks[blockIdx.x];
  const tensor_descriptor tensor = table.tensors[chunk.tensor];
  const typename Formats::operands operands(tensor);
  const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
  const std::uint64_t remaining = tensor.numel - begin;
  std::uint32_t largest = 0;

  if (tensor.vectorizable && remaining >= chunk_elements) {
    largest = update_packs<width, packs>(operands, source, options, chunk.tensor, [&](int pack) {
      return vector_access{begin + (pack * threads + threadIdx.x) * width};
    });
  } else {
    const int count =
        remaining < chunk_elements ? static_cast<int>(remaining) : static_cast<int>(chunk_elements);
    largest = update_packs<width, packs>(operands, source, options, chunk.tensor, [&](int pack) {
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
  }
  // Zero until something was updated: nothing is published for a skipped step.
  if (operands.has_fp8_parameter() && !source.skip()) {
    publish_fp8_scaling(operands, largest, chunk, table.arrivals);
  }
}

}  // namespace stepgraph::cuda
