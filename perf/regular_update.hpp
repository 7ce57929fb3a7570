#pragma once

#include <cuda_runtime_api.h>

#include "stepgraph/cuda/handles.hpp"
#include "stepgraph/kernels/step_block.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::perf {

/// The update of a plan of one signature and one group, launched the regular way: kernel launches
/// with host scalars by value, nothing captured.
class regular_update {
 public:
  /// Copies the plan's tables to the current device. Throws cuda_error.
  explicit regular_update(const step_plan& plan);

  /// Enqueues one update. Throws cuda_error.
  void launch(cudaStream_t stream) const;

 private:
  update_signature signature_;
  update_options options_;
  cuda::unique_device_memory tensors_;
  cuda::unique_device_memory chunks_;
  tensor_table_view table_;
};

}  // namespace stepgraph::perf
