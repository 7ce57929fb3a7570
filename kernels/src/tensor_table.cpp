#include "stepgraph/kernels/tensor_table.hpp"

namespace stepgraph {

bool all_operands_aligned(const tensor_descriptor& tensor) {
  std::uintptr_t bits = 0;
  for (const void* operand : {tensor.parameter, tensor.gradient, tensor.master, tensor.exp_avg,
                              tensor.exp_avg_sq, tensor.max_exp_avg_sq}) {
    bits |= reinterpret_cast<std::uintptr_t>(operand);
  }
  return bits % 16 == 0;
}

void append_chunks(std::vector<chunk_descriptor>& chunks, std::uint32_t tensor,
                   std::uint64_t numel) {
  const std::uint64_t count = chunk_count(numel);
  for (std::uint64_t index = 0; index < count; ++index) {
    chunks.push_back({tensor, static_cast<std::uint32_t>(index)});
  }
}

}  // namespace stepgraph
