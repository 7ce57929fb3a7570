#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stepgraph {

/// The ways to bring a live executor to another plan, in ascending cost.
enum class update_path : std::uint8_t {
  nothing,          ///< the plans ask for the same step
  scalar_write,     ///< values of groups and options, delivered by the next launch
  table_write,      ///< and the tensor table: one small copy before the next launch
  node_parameters,  ///< the step's device memory anew, each node's parameters set in the executable
  graph_update,     ///< likewise, by one update of the whole executable
  instantiate,      ///< a new executable
};

/// "nothing", "scalar_write", "table_write", "node_parameters", "graph_update", "instantiate".
const char* name_of(update_path path);

/// What an update did.
struct update_counts {
  std::uint64_t scalars_written = 0;        ///< values of groups and of the whole step
  std::uint64_t tables_written = 0;         ///< tensor tables, chunk tables, blocks of options
  std::uint64_t nodes_updated = 0;          ///< one by one, in the executable
  std::uint64_t graph_updates = 0;          ///< of the whole executable
  std::uint64_t graph_updates_refused = 0;  ///< by the driver; its error has been cleared
  std::uint64_t instantiations = 0;
};

/// What an update did and why.
struct update_report {
  update_path path = update_path::nothing;  ///< the dearest that was needed
  /// What differs between the plans, by the names of groups, tensors, nodes and edges; then what
  /// the driver refused on the way, if anything.
  std::vector<std::string> reasons;
  update_counts counts;
  /// The step lies in other memory than before: `loss_scale_address` and `totals_address` have
  /// changed, and launches captured before must not be replayed.
  bool rebuilt = false;
  double seconds = 0.0;  ///< on the host, waiting included
};

}  // namespace stepgraph
