#pragma once

#include "stepgraph/kernels/step_block.hpp"

/// The operations of a step as loops on the host: the same tables, the same element math and the
/// same bits as the kernels. All views are of host memory. Synchronous; parallel over chunks with
/// OpenMP; the result does not depend on the number of threads.
namespace stepgraph::host {

/// One pass over all gradients: sum of squares in the order of the device kernel, and whether any
/// element is not finite.
gradient_statistics grad_stats(const tensor_table_view& table);

/// Applies the settings, then advances the step and derives the terms of every group.
void advance_step(const step_block_view& block, const settings_batch& settings,
                  const gradient_statistics& statistics);

/// Applies a batch of settings without advancing the step.
void apply_settings(const step_block_view& block, const settings_batch& settings);

/// Updates every chunk of the table; leaves parameters and state alone when the step is skipped.
void update(const tensor_table_view& table, const step_block_view& block,
            const update_options& options);

}  // namespace stepgraph::host
