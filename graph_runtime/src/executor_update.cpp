#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "option_checks.hpp"
#include "pending_changes.hpp"
#include "plan_update.hpp"
#include "record_ring.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/executor.hpp"

// What the executors share of updates and of the ledger.
namespace stepgraph {
namespace {

update_report finished(detail::plan_update& update) {
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - update.started;
  update.report.seconds = taken.count();
  return std::move(update.report);
}

}  // namespace

void executor::throw_if_stale() const {
  // Not stale any more if another thread has just brought it up to date.
  const std::string reason = detail::ledger_access::why_stale(*ledger_);
  if (!reason.empty()) throw usage_error(reason);
}

std::optional<std::string> executor::recapture_required() const {
  {
    const auto locked = pending_->lock();
    if (locked.closed()) return "the executor was released: build another";
    if (!refused_update_.empty()) return refused_update_;
    if (captures_invalid_) {
      return "an update rebuilt the step: graphs that captured a launch before must not be "
             "replayed";
    }
  }
  std::string reason = detail::ledger_access::why_not_rebindable(*ledger_);
  if (reason.empty()) return std::nullopt;
  return reason;
}

std::unique_ptr<detail::plan_update> executor::prepare_update(step_plan next) {
  const auto started = std::chrono::steady_clock::now();
  detail::check_runnable(next);
  if (!next.tensors.empty() && next.device != device()) {
    throw usage_error(fmt::format("the plan's tensors are on {}, expected {} as the executor",
                                  name_of(next.device), name_of(device())));
  }
  auto plan = std::make_unique<step_plan>(std::move(next));
  auto tables = std::make_unique<detail::step_tables>(*plan);
  std::vector<tensor_descriptor> tensors;
  {
    // Re-binding from another thread changes them.
    const auto locked = pending_->lock_open();
    tensors = tables_->tensors;
  }
  detail::update_need need =
      detail::plan_update_need({*plan_, *tables_, tensors}, {*plan, *tables, tables->tensors});
  for (const auto& [tensor, operand] : need.moved) {
    const tensor_descriptor& descriptor = tables->tensors[tensor];
    const std::string& name = plan->tensors[tensor].operands.name;
    if (descriptor.numel == 0) continue;
    const auto check = [&](const void* data) {
      if (data != nullptr) check_memory(data, name, operand);
    };
    check(detail::address_in(descriptor, operand));
    check(detail::scales_in(descriptor, operand));
    if (operand != operand_kind::parameter) continue;
    check(descriptor.parameter_scaling.scale);
    check(descriptor.parameter_scaling.amax);
    check(descriptor.parameter_scaling.scale_inv);
  }
  if (need.parts.options) check_inputs(*plan);

  detail::pending_changes::replacement pending(plan_->groups.size(), need.group_of_next,
                                               need.settings);
  detail::ledger_access::rows ledger =
      detail::ledger_access::rows_of(*plan, tables->tensors, *ledger_);
  update_report report;
  report.path = need.path;
  for (const detail::update_reason& reason : need.reasons) report.reasons.push_back(reason.text);
  report.counts.scalars_written = need.settings.size();
  report.counts.tables_written = (need.parts.tensors ? 1 : 0) + (need.parts.options ? 1 : 0);
  return std::make_unique<detail::plan_update>(
      detail::plan_update{std::move(plan), std::move(tables), std::move(need), std::move(pending),
                          std::move(ledger), std::move(report), started});
}

void executor::check_ceiling(const detail::plan_update& update, update_path ceiling) {
  if (update.need.path <= ceiling) return;
  const std::string reason =
      fmt::format("the update needs {}, the ceiling is {}: {}", name_of(update.need.path),
                  name_of(ceiling), detail::reasons_above(update.need, ceiling));
  note_refusal(reason);
  throw update_error(reason);
}

void executor::note_refusal(const std::string& reason) {
  std::string text = "an update was refused, the step is that of the plan before: " + reason;
  const auto locked = pending_->lock();
  refused_update_.swap(text);
}

update_report executor::commit_in_place(detail::plan_update& update) noexcept {
  const auto locked = pending_->lock();
  pending_->replace(locked, update.pending, true, update.need.parts);
  // Into the same objects, which the step refers to.
  std::swap(*plan_, *update.plan);
  std::swap(*tables_, *update.tables);
  detail::ledger_access::replace(*ledger_, update.ledger);
  refused_update_.clear();
  return finished(update);
}

update_report executor::commit_rebuilt(detail::plan_update& update,
                                       std::unique_ptr<detail::record_ring>* records,
                                       const std::function<void()>& swap) noexcept {
  const auto locked = pending_->lock();
  pending_->replace(locked, update.pending, false, {});
  plan_.swap(update.plan);
  tables_.swap(update.tables);
  detail::ledger_access::replace(*ledger_, update.ledger);
  if (records != nullptr) *records = records_->replace(std::move(*records));
  refused_update_.clear();
  // The step lies in other memory now.
  if (std::exchange(captured_, false)) captures_invalid_ = true;
  swap();
  return finished(update);
}

void executor::drain_records() { records_->drain(); }

void executor::note_capture() {
  if (captured_) return;
  captured_ = true;
  const auto locked = pending_->lock();
  captures_invalid_ = false;
}

void executor::close(const std::function<void()>& release) {
  auto locked = pending_->lock();
  locked.close();
  release();
}

}  // namespace stepgraph
