#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pending_changes.hpp"
#include "step_tables.hpp"
#include "stepgraph/math/step_scalars.hpp"
#include "stepgraph/operand_kind.hpp"
#include "stepgraph/step_plan.hpp"
#include "stepgraph/update_report.hpp"

namespace stepgraph::detail {

/// A plan and where its tensors are: re-binding moves tensors away from what the plan says.
struct placed_plan {
  const step_plan& plan;
  const step_tables& tables;
  const std::vector<tensor_descriptor>& tensors;
};

/// One difference between two plans and the path that it alone needs.
struct update_reason {
  update_path path = update_path::nothing;
  std::string text;
};

/// An operand that is elsewhere in the next plan.
struct moved_operand {
  tensor_id tensor = 0;
  operand_kind operand = operand_kind::parameter;
};

/// What it takes to bring a live step from one plan to another.
struct update_need {
  update_path path = update_path::nothing;
  std::vector<update_reason> reasons;
  /// Values that differ and that a setting can carry, by the groups of the next plan.
  std::vector<setting> settings;
  /// Other parts that differ, where the path is no dearer than table_write.
  changed_parts parts;
  std::vector<moved_operand> moved;  ///< of tensors that both plans have in the same place
  /// The group of the current plan with the name of each group of the next, or no_group. Of groups
  /// with one name, the first belongs to the first and so on.
  std::vector<std::uint32_t> group_of_next;
};

/// Compares two plans. Knows nothing of drivers: what it calls `node_parameters` a driver may still
/// refuse, and a graph with nodes that are no kernels needs `graph_update` for it.
update_need plan_update_need(const placed_plan& current, const placed_plan& next);

/// The reasons that need more than `ceiling`, in one line.
std::string reasons_above(const update_need& need, update_path ceiling);

}  // namespace stepgraph::detail
