#pragma once

#include "dependent_launch.cuh"
#include "operand_access.cuh"
#include "stepgraph/math/adam.hpp"

/// The update: one block a chunk, one body for every signature.
namespace stepgraph::cuda {

/// The formats of the five operands: static_operand<...> in a tuned kernel, dynamic_operand in the
/// generic one.
template <class Parameter, class Gradient, class Master, class ExpAvg, class ExpAvgSq>
struct update_operands {
  Parameter parameter;
  Gradient gradient;
  Master master;
  ExpAvg exp_avg;
  ExpAvgSq exp_avg_sq;

  __device__ explicit update_operands(const update_signature& signature)
      : parameter(signature.parameter),
        gradient(signature.gradient),
        master(signature.master),
        exp_avg(signature.exp_avg),
        exp_avg_sq(signature.exp_avg_sq) {}
};

/// The operands of a few elements in registers.
template <int Width>
struct loaded_operands {
  float_pack<Width> parameter;
  float_pack<Width> gradient;
  float_pack<Width> exp_avg;
  float_pack<Width> exp_avg_sq;
};

template <int Width, class Operands, class Access>
__device__ __forceinline__ loaded_operands<Width> load_operands(const Operands& operands,
                                                                const tensor_descriptor& tensor,
                                                                Access at) {
  loaded_operands<Width> loaded;
  loaded.gradient = operands.gradient.template load<Width>(tensor.gradient, at);
  // The master, where there is one, is the parameter; the stored parameter is its rounded copy.
  loaded.parameter = operands.master.exists()
                         ? operands.master.template load<Width>(tensor.master, at)
                         : operands.parameter.template load<Width>(tensor.parameter, at);
  loaded.exp_avg = operands.exp_avg.template load<Width>(tensor.exp_avg, at);
  loaded.exp_avg_sq = operands.exp_avg_sq.template load<Width>(tensor.exp_avg_sq, at);
  return loaded;
}

template <int Width, class Operands, class Access>
__device__ __forceinline__ void store_operands(const Operands& operands,
                                               const tensor_descriptor& tensor, Access at,
                                               const loaded_operands<Width>& loaded) {
  operands.parameter.store(tensor.parameter, at, loaded.parameter);
  operands.master.store(tensor.master, at, loaded.parameter);
  operands.exp_avg.store(tensor.exp_avg, at, loaded.exp_avg);
  operands.exp_avg_sq.store(tensor.exp_avg_sq, at, loaded.exp_avg_sq);
}

/// Updates `Packs` times `Width` elements. All loads are issued before the first store, so that
/// they overlap although the compiler must assume that stores may alias them.
template <int Width, int Packs, class Operands, class AccessOf>
__device__ __forceinline__ void update_packs(const Operands& operands,
                                             const tensor_descriptor& tensor,
                                             const step_block_view& block,
                                             const update_options& options, AccessOf&& access_of) {
  loaded_operands<Width> loaded[Packs];
#pragma unroll
  for (int pack = 0; pack < Packs; ++pack) {
    loaded[pack] = load_operands<Width>(operands, tensor, access_of(pack));
  }
  // The operands are in flight while the step's scalars are still being computed: nothing above
  // depends on another kernel of this step.
  wait_for_predecessors();
  const bool skip = block.scalars->skip != 0;
  if (!skip) {
    const math::adam_terms terms = block.terms[tensor.group];
#pragma unroll
    for (int pack = 0; pack < Packs; ++pack) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        math::adam_update(terms, loaded[pack].gradient.value[i], loaded[pack].parameter.value[i],
                          loaded[pack].exp_avg.value[i], loaded[pack].exp_avg_sq.value[i]);
      }
      store_operands(operands, tensor, access_of(pack), loaded[pack]);
    }
  }
  if (options.zero_gradients) {
#pragma unroll
    for (int pack = 0; pack < Packs; ++pack) {
      operands.gradient.store(tensor.gradient, access_of(pack), float_pack<Width>{});
    }
  }
}

/// One block a chunk: loads its chunk and tensor descriptors once, its group's terms once, and
/// touches every element once. Whole chunks of aligned tensors move 16 bytes an access, the rest
/// moves an element an access.
template <class Operands>
__global__ void __launch_bounds__(update_threads)
    update_kernel(tensor_table_view table, step_block_view block, update_options options) {
  constexpr int width = 4;
  constexpr int threads = update_threads;
  constexpr int packs = chunk_elements / (threads * width);
  static_assert(packs * threads * width == chunk_elements);

  let_successors_start();
  const chunk_descriptor chunk = table.chunks[blockIdx.x];
  const tensor_descriptor tensor = table.tensors[chunk.tensor];
  const Operands operands(tensor.signature);
  const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
  const std::uint64_t remaining = tensor.numel - begin;

  if (tensor.vectorizable && remaining >= chunk_elements) {
    update_packs<width, packs>(operands, tensor, block, options, [&](int pack) {
      return vector_access{begin + (pack * threads + threadIdx.x) * width};
    });
  } else {
    // Element i of pack p is begin + (p * width + i) * threads + thread: neighbouring threads
    // touch neighbouring elements.
    const int count =
        remaining < chunk_elements ? static_cast<int>(remaining) : static_cast<int>(chunk_elements);
    update_packs<width, packs>(operands, tensor, block, options, [&](int pack) {
      const int offset = pack * width * threads + static_cast<int>(threadIdx.x);
      const int left = count - offset;
      return element_access{begin + offset, threads,
                            left <= 0 ? 0 : (left + threads - 1) / threads};
    });
  }
}

}  // namespace stepgraph::cuda
