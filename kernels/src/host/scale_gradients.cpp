#include "chunk_loops.hpp"
#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph::host {

void scale_gradients(const statistics_table_view& table, const step_block_view& block) {
  // A factor of one changes nothing.
  if (block.scalars->skip != 0 || block.scalars->gradient_scale == 1.0f) return;
  const chunk_loops& loops = fastest_chunk_loops();
#pragma omp parallel for schedule(static)
  for (std::uint64_t c = 0; c < table.chunk_count; ++c) {
    const chunk_descriptor chunk = table.chunks[c];
    if (chunk.tensor == no_tensor) continue;
    const tensor_descriptor& tensor = table.tensors[chunk.tensor];
    const auto [begin, count] = elements_of(chunk, tensor);
    loops.scale_gradients(tensor, begin, count, block.scalars->gradient_scale);
  }
}

}  // namespace stepgraph::host
