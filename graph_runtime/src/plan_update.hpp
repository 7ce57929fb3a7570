#pragma once

#include <chrono>
#include <memory>

#include "ledger_access.hpp"
#include "pending_changes.hpp"
#include "step_tables.hpp"
#include "stepgraph/step_plan.hpp"
#include "update_planner.hpp"

namespace stepgraph::detail {

/// An update between its checks and its commit: the new plan and all that the commit puts in place
/// of the old, so that the commit cannot fail.
struct plan_update {
  std::unique_ptr<step_plan> plan;
  std::unique_ptr<step_tables> tables;
  update_need need;
  pending_changes::replacement pending;
  ledger_access::rows ledger;
  update_report report;  ///< path and reasons of the planner; the rest is added on the way
  std::chrono::steady_clock::time_point started;
};

/// The update needs at least `path`, for a reason that the plans do not show.
void require_path(plan_update& update, update_path path, const char* reason);

/// The step block that continues what `live`, a block of `current`, has come to, under another
/// plan: progress of the whole step and of every group that stays, and values set by hand unless
/// the new plan says otherwise of them.
step_block_image continued(const step_block_image& live, const step_plan& current,
                           const step_plan& next, const update_need& need);

}  // namespace stepgraph::detail
