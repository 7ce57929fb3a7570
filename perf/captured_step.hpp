#pragma once

#include "stepgraph/cuda/handles.hpp"
#include "stepgraph/cuda/stream_executor.hpp"

namespace stepgraph::perf {

/// A step that was captured by hand, to measure what changing and rebuilding such a graph costs.
class captured_step {
 public:
  /// Captures one launch of `executor`, which must outlive this, and instantiates it.
  explicit captured_step(stream_executor& executor);

  void launch(cudaStream_t stream) const;

  /// Writes the first kernel's parameters again: what changing one of them costs
  /// (cudaGraphExecKernelNodeSetParams).
  void set_first_kernel_parameters();

  /// Updates the executable from the graph it was made from (cudaGraphExecUpdate).
  void update();

  /// Replaces the executable by a new one.
  void instantiate();

 private:
  cuda::unique_graph graph_;
  cuda::unique_graph_exec executable_;
  cudaGraphNode_t first_kernel_ = nullptr;
};

}  // namespace stepgraph::perf
