#pragma once

#include <cuda_runtime_api.h>

#include "stepgraph/kernels/step_block.hpp"

namespace stepgraph::perf {

/// Enqueues the update kernel with the terms of the step as kernel arguments instead of in device
/// memory: what an optimizer does that is not meant for capture ("regular"). The same body as the
/// library's kernel, so that the ratio of the two is the price of being capturable. One group. Only
/// for tuned signatures; cudaErrorInvalidValue for others.
cudaError_t launch_update_by_value(const update_signature& signature,
                                   const tensor_table_view& table, const math::adam_terms& terms,
                                   const update_options& options, cudaStream_t stream);

}  // namespace stepgraph::perf
