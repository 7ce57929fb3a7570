#include "stepgraph/math/advance_step.hpp"

#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph::host {

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
  *block.prepared_step = math::prepare_step(*block.step, *block.scalars);
  for (std::uint32_t i = 0; i < block.group_count; ++i) {
    const group_settings& group = block.groups[i];
    const group_progress& progress = block.progress[i];
    block.prepared_groups[i] =
        math::prepare_group(group, progress, math::next_learning_rate(group, progress),
                            math::next_weight_decay(group, progress),
                            math::next_bias_correction(group, group.beta1, progress),
                            math::next_bias_correction(group, group.beta2, progress));
  }
  math::finish_step(*block.step, *block.prepared_step, statistics, *block.scalars);
  for (std::uint32_t i = 0; i < block.norm_group_count; ++i) {
    block.norms[i] =
        statistics.measured != 0
            ? math::norm_of_total(block.step->norm, totals[i], block.prepared_step->inverse_scale)
            : 0.0;
  }
  if (block.scalars->skip != 0) return;
  for (std::uint32_t i = 0; i < block.group_count; ++i) {
    block.terms[i] = math::finish_group(block.prepared_groups[i], *block.scalars);
    block.progress[i] = block.prepared_groups[i].progress;
  }
}

}  // namespace stepgraph::host
