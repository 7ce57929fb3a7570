#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "device_step.hpp"
#include "foreign_call.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::cuda {

/// The node that carries settings: its parameters, ready to be written with others.
class settings_carrier {
 public:
  settings_carrier() = default;
  /// `position` of the settings among the kernel's `count` arguments.
  settings_carrier(cudaGraphNode_t node, int position, int count);

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

/// A plan captured node by node, so that every graph node keeps the name of its plan node.
class step_graph {
 public:
  /// Captures on a stream of its own, in thread-local mode, and calls the foreign work meanwhile.
  /// Throws usage_error for callbacks that are not those of the plan and for what the driver does
  /// not have, capture_error, cuda_error, and what foreign work throws; whatever it throws, no
  /// stream stays captured.
  step_graph(const step_plan& plan, const device_step& step, const foreign_work& foreign = {},
             const graph_options& options = {});

  cudaGraph_t get() const noexcept { return graph_.get(); }
  /// The graph node of each plan node, null for foreign work. Of more than one step a launch, they
  /// are nodes of the loop's body.
  const std::vector<cudaGraphNode_t>& nodes() const noexcept { return nodes_; }
  /// An executable of the graph. Throws cuda_error, or capture_error with the names of foreign work
  /// that conditional bodies may not be able to hold.
  unique_graph_exec instantiate() const;
  /// The node of the outermost graph that delivers settings to a launch.
  settings_carrier carrier() const;
  /// The nodes of the plan, which must be the one that was captured, as they were captured.
  std::vector<graph_node_info> describe(const step_plan& plan) const;

 private:
  struct recording;
  /// Captures foreign work for a conditional body into a graph of its own, before anything else. A
  /// call that invalidates a capture into a body would have the driver free the body, which the
  /// graph around it would then free again.
  void capture_apart(recording& now, std::size_t node);
  void capture_step(recording& now);
  void capture_loop(recording& now, std::uint32_t steps);
  void add_branch(recording& now, std::size_t node);
  template <class Finish>
  static void finish_naming_forks(const recording& now, Finish&& finish);

  unique_graph graph_;
  std::vector<cudaGraphNode_t> nodes_;
  std::vector<std::size_t> foreign_nodes_;  ///< how many graph nodes foreign work became
  cudaGraphNode_t carrier_node_ = nullptr;
  node_kind carrier_kind_ = node_kind::advance_step;
  bool looped_ = false;
  std::string bodies_;  ///< the foreign work in conditional bodies, in words
};

}  // namespace stepgraph::cuda
