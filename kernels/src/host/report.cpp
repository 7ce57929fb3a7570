#include <atomic>

#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph::host {

void report(const step_block_view& block, const record_ring_view& ring) {
  const std::uint64_t sequence = sequence_of(*block.scalars);
  record_slot& slot = ring.slots[(sequence - 1) % ring.capacity];
  record_group* const groups = ring.groups + (sequence - 1) % ring.capacity * block.group_count;
  const std::atomic_ref<std::uint64_t> published(slot.sequence);
  published.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  fill_record(*block.scalars, slot);
  for (std::uint32_t i = 0; i < block.group_count; ++i) {
    groups[i] = record_of(block.progress[i]);
  }
  published.store(sequence, std::memory_order_release);
}

}  // namespace stepgraph::host
