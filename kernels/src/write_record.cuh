#pragma once

#include "stepgraph/kernels/step_block.hpp"

namespace stepgraph::cuda {

/// Copies `count` elements by all threads of the block, 4 bytes an access: neighbouring threads
/// fill the packets of the bus.
template <class Element>
__device__ __forceinline__ void copy_in_block(const Element* source, Element* target,
                                              std::uint32_t count) {
  static_assert(sizeof(Element) % sizeof(std::uint32_t) == 0);
  const auto* from = reinterpret_cast<const std::uint32_t*>(source);
  auto* to = reinterpret_cast<std::uint32_t*>(target);
  const std::uint32_t words = count * static_cast<std::uint32_t>(sizeof(Element) / sizeof(*to));
  for (std::uint32_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}

/// Writes the record of the step that has advanced, by one thread block that sees its scalars and
/// the progress of its groups; see record_slot for the order.
__device__ __forceinline__ void write_record_in_block(const step_block_view& block) {
  const record_ring_view& ring = block.records;
  const std::uint64_t number = block.scalars->launches;
  const std::uint64_t place = (number - 1) % ring.capacity;
  copy_in_block(block.scalars, &ring.slots[place].scalars, 1);
  copy_in_block(block.progress, ring.groups + place * block.group_count, block.group_count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const auto sequence_of = [&](std::uint64_t slot) -> volatile std::uint64_t& {
    return ring.slots[slot].sequence;
  };
  sequence_of(number % ring.capacity) = 0;
  __threadfence_system();
  sequence_of(place) = number;
}

}  // namespace stepgraph::cuda
