#include <atomic>
#include <cstring>

#include "chunk_loops.hpp"
#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph::host {
namespace {

/// Raises amax to a magnitude given as f32 bits, which are ordered as the magnitudes.
void raise_amax(float* amax, std::uint32_t magnitude) {
  std::atomic_ref<std::uint32_t> bits(*reinterpret_cast<std::uint32_t*>(amax));
  std::uint32_t current = bits.load(std::memory_order_relaxed);
  while (magnitude > current && !bits.compare_exchange_weak(current, magnitude)) {
  }
}

}  // namespace

void update(const tensor_table_view& table, const step_block_view& block,
            const update_options& options) {
  const chunk_loops& loops = fastest_chunk_loops();
  const bool skip = block.scalars->skip != 0;
  const bool zero_gradients = options.gradients == gradient_store::zero;
  if (skip && !zero_gradients) return;

#pragma omp parallel for schedule(static)
  for (std::uint64_t c = 0; c < table.chunk_count; ++c) {
    const chunk_descriptor chunk = table.chunks[c];
    const tensor_descriptor& tensor = table.tensors[chunk.tensor];
    const auto [begin, count] = elements_of(chunk, tensor);
    if (!skip) {
      const math::rounding_source rounding = {options.stochastic_rounding, options.seed,
                                              block.scalars->step, chunk.tensor};
      const std::uint32_t largest =
          loops.update(tensor, begin, count, block.terms[tensor.group], rounding);
      if (is_fp8(tensor.signature.parameter)) raise_amax(tensor.parameter_scaling.amax, largest);
    }
    if (options.gradients == gradient_store::unscaled && !skip) {
      loops.scale_gradients(tensor, begin, count, block.scalars->gradient_scale);
    }
    if (zero_gradients) {
      const std::size_t size = element_size(tensor.signature.gradient);
      std::memset(static_cast<char*>(tensor.gradient) + begin * size, 0, count * size);
    }
  }
  if (skip) return;
  // Once all chunks have read the old inverse.
  for (std::uint64_t c = 0; c < table.chunk_count; ++c) {
    const tensor_descriptor& tensor = table.tensors[table.chunks[c].tensor];
    if (table.chunks[c].index == 0 && is_fp8(tensor.signature.parameter)) {
      *tensor.parameter_scaling.scale_inv = 1.0f / *tensor.parameter_scaling.scale;
    }
  }
}

}  // namespace stepgraph::host
