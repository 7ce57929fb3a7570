#include "stepgraph/math/advance_step.hpp"

#include <atomic>
#include <cstddef>
#include <cstring>

#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph::host {
namespace {

/// Writes `bytes` of a record at `words`, as tagged words.
void write_words(const void* bytes, std::uint32_t count, std::uint32_t tag, std::uint64_t* words) {
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint32_t value;
    std::memcpy(&value, static_cast<const std::byte*>(bytes) + i * sizeof value, sizeof value);
    // Who has the record sees what came before it, too.
    std::atomic_ref<std::uint64_t>(words[i]).store(tagged_word(tag, value),
                                                   std::memory_order_release);
  }
}

void write_record(const step_block_view& block) {
  if (block.records.words == nullptr) return;
  const std::uint64_t launch = block.scalars->launches;
  std::uint64_t* const record = record_of(block.records, block.group_count, launch);
  write_words(block.scalars, scalar_words, tag_of_launch(launch), record);
  write_words(block.progress, block.group_count * progress_words, tag_of_launch(launch),
              record + scalar_words);
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
  const math::step_decision decision = math::decide_step(*block.step, prepared, statistics);
  math::finish_step(*block.step, prepared, statistics, decision, *block.scalars);
  for (std::uint32_t i = 0; i < block.norm_group_count; ++i) {
    block.norms[i] = statistics.measured != 0
                         ? math::norm_of_total(block.step->norm, totals[i], prepared.inverse_scale)
                         : 0.0;
  }
  if (!decision.skip) {
    for (std::uint32_t i = 0; i < block.group_count; ++i) {
      block.terms[i] = math::finish_group(block.prepared_groups[i], decision.gradient_scale);
      block.progress[i] = block.prepared_groups[i].progress;
    }
  }
  write_record(block);
}

}  // namespace stepgraph::host
