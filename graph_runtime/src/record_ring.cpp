#include "record_ring.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

namespace stepgraph::detail {
namespace {

std::uint64_t sequence_in(record_slot& slot) {
  return std::atomic_ref<std::uint64_t>(slot.sequence).load(std::memory_order_acquire);
}

/// One more than the records it holds: one slot is always empty, for the next record.
std::size_t slots_of(const step_plan& plan) {
  return std::size_t{plan.options.record_capacity} + 1;
}

std::size_t slots_bytes(const step_plan& plan) { return slots_of(plan) * sizeof(record_slot); }

}  // namespace

std::size_t record_ring::bytes_for(const step_plan& plan) {
  return slots_bytes(plan) + slots_of(plan) * plan.groups.size() * sizeof(group_progress);
}

record_ring::record_ring(const step_plan& plan, std::shared_ptr<void> memory,
                         std::uint64_t launches)
    : memory_(std::move(memory)),
      slots_(static_cast<record_slot*>(memory_.get())),
      groups_(reinterpret_cast<group_progress*>(static_cast<std::byte*>(memory_.get()) +
                                                slots_bytes(plan))),
      capacity_(static_cast<std::uint32_t>(slots_of(plan))),
      group_count_(static_cast<std::uint32_t>(plan.groups.size())),
      next_(launches + 1) {
  std::uninitialized_value_construct_n(slots_, capacity_);
  std::uninitialized_value_construct_n(groups_, std::size_t{capacity_} * group_count_);
}

record_ring_view record_ring::view() const noexcept { return {slots_, groups_, capacity_}; }

bool record_ring::copy_next(step_record& record) const {
  const std::uint64_t place = (next_ - 1) % capacity_;
  record_slot& slot = slots_[place];
  if (sequence_in(slot) != next_) return false;
  const volatile step_scalars& source = slot.scalars;
  record.launch = next_;
  record.step = source.step;
  record.skipped = source.skipped;
  record.samples = source.samples;
  record.zeros = source.zeros;
  record.grad_norm = source.grad_norm;
  record.loss_scale = static_cast<double>(source.loss_scale);
  record.clip_coefficient = static_cast<double>(source.clip_coefficient);
  record.was_skipped = source.skip != 0;
  record.found_inf = source.found_inf != 0;
  record.groups.resize(group_count_);
  for (std::uint32_t i = 0; i < group_count_; ++i) {
    const volatile group_progress& group = groups_[place * group_count_ + i];
    record.groups[i] = {group.step, group.learning_rate, group.weight_decay};
  }
  // Had the writer begun the next record of this slot meanwhile, the number would be gone.
  std::atomic_thread_fence(std::memory_order_acquire);
  return sequence_in(slot) == next_;
}

record_batch record_ring::read() {
  record_batch batch;
  step_record record;
  for (;;) {
    if (copy_next(record)) {
      batch.records.push_back(record);
      ++next_;
      continue;
    }
    // Records are written in order: if a later one is there, this one was. One slot of the ring is
    // always empty, so look at two; at the later one first, lest a record that is written in
    // between be taken for lost.
    const std::uint64_t later = sequence_in(slots_[next_ % capacity_]);
    const std::uint64_t here = sequence_in(slots_[(next_ - 1) % capacity_]);
    if (here == next_) continue;
    const std::uint64_t found = std::max(later, here);
    if (found <= next_) return batch;
    // With record n there, at least those of the ring's last slots before it are.
    const std::uint64_t oldest = found > capacity_ ? found - capacity_ + 2 : next_ + 1;
    const std::uint64_t resume = std::max(oldest, next_ + 1);
    batch.overwritten += resume - next_;
    next_ = resume;
  }
}

void record_reader::collect() {
  if (!ring_) return;
  record_batch fresh = ring_->read();
  kept_.overwritten += fresh.overwritten;
  kept_.records.insert(kept_.records.end(), std::make_move_iterator(fresh.records.begin()),
                       std::make_move_iterator(fresh.records.end()));
}

record_batch record_reader::read() {
  const std::lock_guard lock(mutex_);
  collect();
  return std::exchange(kept_, {});
}

void record_reader::drain() {
  const std::lock_guard lock(mutex_);
  collect();
  // Nobody may ever read: the memory stays bounded through any number of updates.
  const std::size_t limit = ring_ ? ring_->capacity() - 1 : kept_.records.size();
  if (kept_.records.size() <= limit) return;
  const auto excess = static_cast<std::ptrdiff_t>(kept_.records.size() - limit);
  kept_.records.erase(kept_.records.begin(), kept_.records.begin() + excess);
  kept_.overwritten += static_cast<std::uint64_t>(excess);
}

std::unique_ptr<record_ring> record_reader::replace(std::unique_ptr<record_ring> ring) noexcept {
  const std::lock_guard lock(mutex_);
  return std::exchange(ring_, std::move(ring));
}

}  // namespace stepgraph::detail
