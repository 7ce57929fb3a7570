#include "dependent_launch.cuh"
#include "operand_formats.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"

namespace stepgraph::cuda {
namespace {

constexpr int threads = statistics_threads;

template <storage_format Format>
__device__ __forceinline__ void scale_chunk(const tensor_descriptor& tensor, std::uint64_t begin,
                                            int count, float factor) {
  constexpr int width = 16 / sizeof(typename math::format_traits<Format>::storage);
  constexpr int passes = chunk_elements / (threads * width);
  const plain_operand<Format> operand{tensor.gradient};
  const bool whole = count == static_cast<int>(chunk_elements) &&
                     reinterpret_cast<std::uintptr_t>(tensor.gradient) % 16 == 0;
  const auto scale = [&](auto access_of) {
    stored_bits<width> bits[passes];
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      bits[pass] = operand.template fetch<width>(access_of(pass));
    }
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      operand.store(access_of(pass), scaled(operand.decode(bits[pass]), factor));
    }
  };
  const auto offset_of = [](int pass) {
    return (pass * threads + static_cast<int>(threadIdx.x)) * width;
  };
  if (whole) {
    scale([&](int pass) { return vector_access{begin + offset_of(pass)}; });
  } else {
    scale([&](int pass) {
      return element_access{begin + offset_of(pass), 1, count - offset_of(pass)};
    });
  }
}

__global__ void __launch_bounds__(threads)
    scale_gradients_kernel(statistics_table_view table, step_block_view block) {
  let_successors_start();
  wait_for_predecessors();
  const float factor = block.scalars->gradient_scale;
  if (block.scalars->skip != 0 || factor == 1.0f) return;
  const chunk_descriptor chunk = table.chunks[blockIdx.x];
  if (chunk.tensor == no_tensor) return;
  const tensor_descriptor tensor = table.tensors[chunk.tensor];
  const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
  const std::uint64_t remaining = tensor.numel - begin;
  const int count =
      remaining < chunk_elements ? static_cast<int>(remaining) : static_cast<int>(chunk_elements);
  table_format(tensor.signature.gradient)
      .visit<storage_format::f32, storage_format::f16, storage_format::bf16>(
          [&](auto format) { scale_chunk<format.value>(tensor, begin, count, factor); });
}

}  // namespace

cudaError_t launch_scale_gradients(const statistics_table_view& table, const step_block_view& block,
                                   launch_order order, cudaStream_t stream) {
  return launch(scale_gradients_kernel, static_cast<std::uint32_t>(table.chunk_count), threads,
                order, stream, table, block);
}

}  // namespace stepgraph::cuda
