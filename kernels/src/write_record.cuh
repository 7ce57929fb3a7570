#pragma once

#include "stepgraph/kernels/step_block.hpp"

namespace stepgraph::cuda {

/// Writes the record of the step that has advanced, by one thread block that sees its scalars and
/// the progress of its groups. Neighbouring threads fill the packets of the bus.
__device__ __forceinline__ void write_record_in_block(const step_block_view& block) {
  const auto* scalars = reinterpret_cast<const std::uint32_t*>(block.scalars);
  const auto* progress = reinterpret_cast<const std::uint32_t*>(block.progress);
  const std::uint64_t launch = block.scalars->launches;
  std::uint64_t* const record = record_of(block.records, block.group_count, launch);
  const std::uint32_t words = words_of_record(block.group_count);
  for (std::uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
    const std::uint32_t value = i < scalar_words ? scalars[i] : progress[i - scalar_words];
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(record + i),
                 "l"(tagged_word(tag_of_launch(launch), value))
                 : "memory");
  }
}

}  // namespace stepgraph::cuda
