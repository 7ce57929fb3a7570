#include "record_ring.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

namespace stepgraph::detail {
namespace {

std::uint32_t group_count(const step_plan& plan) {
  return static_cast<std::uint32_t>(plan.groups.size());
}

std::size_t words_of_ring(const step_plan& plan) {
  return std::size_t{plan.options.record_capacity} * words_of_record(group_count(plan));
}

}  // namespace

std::size_t record_ring::bytes_for(const step_plan& plan) {
  return words_of_ring(plan) * sizeof(std::uint64_t);
}

record_ring::record_ring(const step_plan& plan, std::shared_ptr<void> memory,
                         std::uint64_t launches)
    : memory_(std::move(memory)),
      ring_{static_cast<std::uint64_t*>(memory_.get()), plan.options.record_capacity},
      group_count_(group_count(plan)),
      next_(launches + 1),
      values_(words_of_record(group_count_)) {
  // As if of the launch before the first, which is nowhere awaited.
  const std::uint32_t tag = tag_of_launch(launches);
  std::uninitialized_fill_n(ring_.words, words_of_ring(plan), tagged_word(tag, 0));
  for (std::uint64_t place = 1; place <= ring_.capacity; ++place) {
    record_of(ring_, group_count_, place)[launch_word] =
        tagged_word(tag, static_cast<std::uint32_t>(launches >> 32));
  }
}

std::uint64_t record_ring::copy_next() {
  std::uint64_t* const record = record_of(ring_, group_count_, next_);
  const auto load = [&](std::size_t i) {
    return std::atomic_ref<std::uint64_t>(record[i]).load(std::memory_order_acquire);
  };
  // The other words are of this launch or of one that is only a few turns of the ring away.
  const std::uint64_t known = load(launch_word);
  const std::uint64_t launch = std::uint64_t{value_of(known)} << 32 | tag_of(known);
  bool complete = true;
  std::uint64_t newest = launch;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const std::uint64_t word = load(i);
    values_[i] = value_of(word);
    const auto ahead = static_cast<std::int32_t>(tag_of(word) - tag_of_launch(launch));
    const std::uint64_t of_word = launch + static_cast<std::uint64_t>(std::int64_t{ahead});
    complete = complete && of_word == next_;
    newest = std::max(newest, of_word);
  }
  return complete || newest > next_ ? newest : 0;
}

step_record record_ring::copied() const {
  step_scalars scalars;
  std::memcpy(static_cast<void*>(&scalars), values_.data(), sizeof scalars);
  step_record record;
  record.launch = scalars.launches;
  record.step = scalars.step;
  record.skipped = scalars.skipped;
  record.samples = scalars.samples;
  record.zeros = scalars.zeros;
  record.grad_norm = scalars.grad_norm;
  record.loss_scale = static_cast<double>(scalars.loss_scale);
  record.clip_coefficient = static_cast<double>(scalars.clip_coefficient);
  record.was_skipped = scalars.skip != 0;
  record.found_inf = scalars.found_inf != 0;
  record.groups.resize(group_count_);
  for (std::uint32_t i = 0; i < group_count_; ++i) {
    group_progress group;
    std::memcpy(static_cast<void*>(&group), values_.data() + scalar_words + i * progress_words,
                sizeof group);
    record.groups[i] = {group.step, group.learning_rate, group.weight_decay};
  }
  return record;
}

record_batch record_ring::read() {
  record_batch batch;
  for (;;) {
    const std::uint64_t found = copy_next();
    if (found == 0) return batch;
    if (found == next_) {
      batch.records.push_back(copied());
      ++next_;
      continue;
    }
    // That one takes the place of the record `capacity` launches before it. Those in between are
    // complete, for each launch writes its record before the next.
    const std::uint64_t oldest = found - ring_.capacity + 1;
    batch.overwritten += oldest - next_;
    next_ = oldest;
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
  const std::size_t limit = ring_ ? ring_->capacity() : kept_.records.size();
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
