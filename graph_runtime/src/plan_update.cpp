#include "plan_update.hpp"

#include <algorithm>

#include "stepgraph/math/advance_step.hpp"

namespace stepgraph::detail {
namespace {

/// The values that setters change.
void keep_hand_set(const group_settings& from, group_settings& to) {
  to.learning_rate = from.learning_rate;
  to.learning_rate_schedule.held_by_hand = from.learning_rate_schedule.held_by_hand;
  to.weight_decay = from.weight_decay;
  to.weight_decay_schedule.held_by_hand = from.weight_decay_schedule.held_by_hand;
  to.beta1 = from.beta1;
  to.beta2 = from.beta2;
  to.eps = from.eps;
}

}  // namespace

void require_path(plan_update& update, update_path path, const char* reason) {
  update.need.reasons.push_back({path, reason});
  update.report.reasons.emplace_back(reason);
  update.need.path = std::max(update.need.path, path);
  update.report.path = update.need.path;
}

step_block_image continued(const step_block_image& live, const step_plan& current,
                           const step_plan& next, const update_need& need) {
  step_block_image image(next);
  image.scalars = live.scalars;
  image.scalars.settings_serial = 0;  // the batches of the new step are counted from 1
  image.step.max_grad_norm = live.step.max_grad_norm;
  image.step.skip_above_norm = live.step.skip_above_norm;
  image.step.samples_per_step = live.step.samples_per_step;
  if (current.norm_groups == next.norm_groups) image.norms = live.norms;
  for (std::size_t group = 0; group < image.groups.size(); ++group) {
    const std::uint32_t before = need.group_of_next[group];
    if (before == no_group) continue;
    keep_hand_set(live.groups[before], image.groups[group]);
    image.progress[group] = live.progress[before];
  }
  for (const setting& entry : need.settings) {
    if (entry.group == whole_step) {
      math::apply_setting(image.step, image.scalars, entry.field, entry.value);
    } else {
      math::apply_setting(image.groups[entry.group], image.progress[entry.group], entry.field,
                          entry.value);
    }
  }
  return image;
}

}  // namespace stepgraph::detail
