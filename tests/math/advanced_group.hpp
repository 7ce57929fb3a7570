#pragma once

#include "stepgraph/math/advance_step.hpp"

/// A group through both halves of the advance, as every executor takes it.
namespace stepgraph::test {

/// The group as its next update would leave it.
inline math::prepared_group prepared(const group_settings& group, const group_progress& progress,
                                     const schedule_tables& tables = {},
                                     std::uint64_t samples = 0) {
  return math::prepare_group(group, progress,
                             math::next_learning_rate(group, progress, tables, samples),
                             math::next_weight_decay(group, progress, tables, samples),
                             math::next_bias_correction(group, group.beta1, progress),
                             math::next_bias_correction(group, group.beta2, progress));
}

/// Advances the group by one applied update; returns its terms.
inline math::adam_terms advance(const group_settings& group, group_progress& progress,
                                const step_scalars& scalars = {},
                                const schedule_tables& tables = {}) {
  const math::prepared_group next = prepared(group, progress, tables, scalars.samples);
  progress = next.progress;
  return math::finish_group(next, scalars.gradient_scale);
}

/// Advances the step by a gradient with these statistics.
inline void advance(const step_settings& settings, const gradient_statistics& statistics,
                    step_scalars& scalars) {
  const math::prepared_step prepared = math::prepare_step(settings, scalars);
  math::finish_step(settings, prepared, statistics,
                    math::decide_step(settings, prepared, statistics), scalars);
}

}  // namespace stepgraph::test
