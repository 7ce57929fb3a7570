#include <cstring>

#include "chunk_loops.hpp"
#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph::host {
void update(const tensor_table_view& table, const step_block_view& block,
            const update_options& options) {
  const chunk_loops& loops = fastest_chunk_loops();
  const bool skip = block.scalars->skip != 0;
  if (skip && !options.zero_gradients) return;

#pragma omp parallel for schedule(static)
  for (std::uint64_t c = 0; c < table.chunk_count; ++c) {
    const chunk_descriptor chunk = table.chunks[c];
    const tensor_descriptor& tensor = table.tensors[chunk.tensor];
    const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
    const std::uint64_t remaining = tensor.numel - begin;
    const std::uint64_t count = remaining < chunk_elements ? remaining : chunk_elements;
    if (!skip) loops.update(tensor, begin, count, block.terms[tensor.group]);
    if (options.zero_gradients) {
      const std::size_t size = element_size(tensor.signature.gradient);
      std::memset(static_cast<char*>(tensor.gradient) + begin * size, 0, count * size);
    }
  }
}

}  // namespace stepgraph::host
