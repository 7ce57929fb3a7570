#pragma once

#include "stepgraph/kernels/step_block.hpp"

/// The operations of a step as loops on the host: the same tables, the same element math and the
/// same bits as the kernels. All views are of host memory. Synchronous; parallel over chunks with
/// OpenMP; the result does not depend on the number of threads.
namespace stepgraph::host {

/// One pass over all gradients, in the order of the device kernel. `totals` receives the total of
/// each norm group.
gradient_statistics grad_stats(const statistics_table_view& table,
                               const statistics_options& options, double* totals);

/// Applies the settings, advances the step, derives the terms of every group and writes the record.
/// `totals` are those of the norm groups; null if nothing was measured.
void advance_step(const step_block_view& block, const settings_batch& settings,
                  const gradient_statistics& statistics, const double* totals);

/// Applies a batch of settings without advancing the step.
void apply_settings(const step_block_view& block, const settings_batch& settings);

/// Updates every chunk of the table; leaves parameters and state alone when the step is skipped.
void update(const tensor_table_view& table, const step_block_view& block,
            const update_options& options);

/// Multiplies every gradient by the step's gradient scale, in place, unless the step is skipped.
void scale_gradients(const statistics_table_view& table, const step_block_view& block);

}  // namespace stepgraph::host
