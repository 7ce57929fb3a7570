#include "stepgraph/math/advance_step.hpp"

#include <algorithm>
#include <atomic>

#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph::host {
namespace {

/// Writes the record; see record_slot for the order.
void write_record(const step_block_view& block) {
  const record_ring_view& ring = block.records;
  if (ring.slots == nullptr) return;
  const std::uint64_t number = block.scalars->launches;
  const std::uint64_t place = (number - 1) % ring.capacity;
  ring.slots[place].scalars = *block.scalars;
  std::copy_n(block.progress, block.group_count, ring.groups + place * block.group_count);
  const auto sequence_of = [&](std::uint64_t slot) {
    return std::atomic_ref<std::uint64_t>(ring.slots[slot].sequence);
  };
  sequence_of(number % ring.capacity).store(0, std::memory_order_release);
  sequence_of(place).store(number, std::memory_order_release);
  // The next record is not begun before its slot is seen to be empty.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace

void apply_settings(const step_block_view& block, const settings_batch& settings) {
  if (settings.serial == 0 || settings.serial == block.scalars->settings_serial) return;
  const setting* entries = settings.entries != nullptr ? settings.entries : settings.few;
  for (std::uint32_t i = 0; i < settings.count; ++i) {
    const setting& entry = entries[i];
    if (entry.group == whole_step) {
      math::apply_setting(*block.step, *block.scalars, entry.field, entry.value);
    } else {
      math::apply_setting(block.groups[entry.group], block.progress[entry.group], entry.field,
                          entry.value);
    }
  }
  block.scalars->settings_serial = settings.serial;
}

void advance_step(const step_block_view& block, const settings_batch& settings,
                  const gradient_statistics& statistics, const double* totals) {
  apply_settings(block, settings);
  const math::prepared_step prepared = math::prepare_step(*block.step, *block.scalars);
  const std::uint64_t samples = block.scalars->samples;
  for (std::uint32_t i = 0; i < block.group_count; ++i) {
    const group_settings& group = block.groups[i];
    const group_progress& progress = block.progress[i];
    block.prepared_groups[i] = math::prepare_group(
        group, progress, math::next_learning_rate(group, progress, block.schedules, samples),
        math::next_weight_decay(group, progress, block.schedules, samples),
        math::next_bias_correction(group, group.beta1, progress),
        math::next_bias_correction(group, group.beta2, progress));
  }
  math::finish_step(*block.step, prepared, statistics, *block.scalars);
  for (std::uint32_t i = 0; i < block.norm_group_count; ++i) {
    block.norms[i] = statistics.measured != 0
                         ? math::norm_of_total(block.step->norm, totals[i], prepared.inverse_scale)
                         : 0.0;
  }
  if (block.scalars->skip == 0) {
    for (std::uint32_t i = 0; i < block.group_count; ++i) {
      block.terms[i] = math::finish_group(block.prepared_groups[i], *block.scalars);
      block.progress[i] = block.prepared_groups[i].progress;
    }
  }
  write_record(block);
}

}  // namespace stepgraph::host
