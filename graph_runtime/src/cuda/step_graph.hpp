#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "device_step.hpp"
#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::cuda {

/// A plan captured node by node, so that every graph node keeps the name of its plan node.
class step_graph {
 public:
  /// Captures on a stream of its own, in thread-local mode. Throws capture_error and cuda_error.
  step_graph(const step_plan& plan, const device_step& step);

  cudaGraph_t get() const noexcept { return graph_.get(); }
  /// The graph node of each plan node.
  const std::vector<cudaGraphNode_t>& nodes() const noexcept { return nodes_; }

 private:
  unique_graph graph_;
  std::vector<cudaGraphNode_t> nodes_;
};

/// The node that carries settings: its parameters, ready to be written with others.
class settings_carrier {
 public:
  settings_carrier() = default;
  settings_carrier(cudaGraphNode_t node, node_kind kind);

  cudaGraphNode_t node() const noexcept { return node_; }
  /// From now on the batch goes to this node of the executable, by the name that the graph it was
  /// instantiated from gives it.
  void aim_at(cudaGraphNode_t node) noexcept { node_ = node; }

  /// Writes a batch into the executable: the next launch takes it, those made before do not.
  void write(cudaGraphExec_t executable, const settings_batch& settings);

 private:
  cudaGraphNode_t node_ = nullptr;
  cudaKernelNodeParams parameters_ = {};
  std::vector<void*> arguments_;  ///< stay in the graph's node, which is never changed
  std::size_t position_ = 0;
};

}  // namespace stepgraph::cuda
