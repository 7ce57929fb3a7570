#include "stepgraph/math/advance_step.hpp"

#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph::host {

void apply_settings(const step_block_view& block, const settings_batch& settings) {
  if (settings.serial == 0 || settings.serial == block.scalars->settings_serial) return;
  for (std::uint32_t i = 0; i < settings.count; ++i) {
    const setting& entry = settings.entries[i];
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
                  const gradient_statistics& statistics) {
  apply_settings(block, settings);
  math::advance_scalars(*block.step, statistics, *block.scalars);
  if (block.scalars->skip) return;
  for (std::uint32_t group = 0; group < block.group_count; ++group) {
    block.terms[group] = math::advance_group(block.groups[group], *block.step, *block.scalars,
                                             block.progress[group]);
  }
}

}  // namespace stepgraph::host
