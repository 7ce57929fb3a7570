#pragma once

#include <vector>

#include "stepgraph/step_builder.hpp"

namespace stepgraph::detail {

/// Throws usage_error if the name is empty or taken.
void check_foreign_node(const foreign_node& work, const std::vector<foreign_node>& others);

/// Puts foreign work among the nodes of the plan, which has no edges yet. Throws usage_error if a
/// node does not exist or if work depends on a decision that comes later.
void place_foreign_nodes(step_plan& plan, const std::vector<foreign_node>& works);

}  // namespace stepgraph::detail
