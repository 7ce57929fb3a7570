#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "step_graph.hpp"
#include "stepgraph/cuda/handles.hpp"
#include "stepgraph/update_report.hpp"

namespace stepgraph::cuda {

/// The instantiated graph of a step, which can be turned into that of another graph.
class step_executable {
 public:
  /// Instantiates the graph and uploads it in the order of `stream`. `carrier` is the graph's.
  step_executable(std::shared_ptr<const step_graph> graph, settings_carrier carrier,
                  cudaStream_t stream);

  /// The graph that a launch runs.
  const step_graph& graph() const noexcept { return *graph_; }
  std::uint64_t instantiations() const noexcept { return instantiations_; }

  /// Throws update_error where a failed update has left nothing to launch.
  void launch(cudaStream_t stream);
  /// Writes a batch of settings for the next launch.
  void write(const settings_batch& settings);

  /// Turns the executable into that of `next`, the graph of `plan`, by the cheapest path from
  /// `needed` on that the driver accepts; launches made so far are not affected. Adds what it does
  /// to the report. A graph that the driver may take as an update is offered to it even where
  /// another instantiation is expected: that costs a hundredth.
  ///
  /// Throws update_error if `ceiling` forbids what is left, cuda_error if instantiating fails, and
  /// then runs the old graph as before.
  void follow(std::shared_ptr<const step_graph> next, settings_carrier carrier,
              const step_plan& plan, update_path needed, update_path ceiling,
              update_report& report);

 private:
  /// What the executable calls the node that carries the settings of `next`, should it become that
  /// graph's; null: nothing.
  cudaGraphNode_t place_of(cudaGraphNode_t carrier, const step_graph& next) const;
  bool set_nodes(const step_graph& next, const step_plan& plan, update_report& report);
  bool update_whole(const step_graph& next, const step_plan& plan, update_report& report);
  /// After a refusal or a failure half-way.
  void restore() noexcept;

  std::shared_ptr<const step_graph> graph_;
  /// What was instantiated: its nodes name those of the executable for good.
  std::shared_ptr<const step_graph> origin_;
  unique_graph_exec executable_;
  settings_carrier carrier_;
  cudaGraphNode_t carrier_node_;  ///< of the origin
  std::uint64_t instantiations_ = 0;
};

}  // namespace stepgraph::cuda
