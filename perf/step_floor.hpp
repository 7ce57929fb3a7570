#pragma once

#include <cuda_runtime_api.h>

#include "benchmark_problem.hpp"
#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::perf {

/// The least that the parts of a whole step cost on this machine, one kernel a part: the best copy
/// for the update, CUB's reduction for reading every gradient, a memset for zeroing them.
class step_floor {
 public:
  /// For the tensors of `problem`, whose gradients are f32. Keeps references.
  step_floor(const benchmark_problem& problem, cudaStream_t stream);

  /// Enqueues the parts. Throw cuda_error.
  void update(cudaStream_t stream) const { update_.launch(stream); }
  void read_gradients(cudaStream_t stream) const;
  void zero_gradients(cudaStream_t stream) const;

  /// Enqueues a copy of the gradients as they were at construction.
  void restore_gradients(cudaStream_t stream) const;

 private:
  pure_stream update_;
  float* gradients_;
  std::uint64_t elements_;
  cuda::unique_device_memory workspace_;
  std::size_t workspace_bytes_ = 0;
  cuda::unique_device_memory result_;
  cuda::unique_device_memory original_gradients_;
};

}  // namespace stepgraph::perf
