#include "stepgraph/address_ledger.hpp"

#include <fmt/format.h>

#include <functional>
#include <string_view>
#include <unordered_map>

#include "ledger_access.hpp"
#include "step_tables.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph {

const char* name_of(operand_kind kind) {
  switch (kind) {
    case operand_kind::parameter:
      return "parameter";
    case operand_kind::gradient:
      return "gradient";
    case operand_kind::master:
      return "master";
    case operand_kind::exp_avg:
      return "exp_avg";
    case operand_kind::exp_avg_sq:
      return "exp_avg_sq";
    case operand_kind::max_exp_avg_sq:
      return "max_exp_avg_sq";
  }
  return "unknown";
}

bool address_ledger::is_stale(const place& at) noexcept {
  return at.bytes != 0 && (at.freed || at.now != at.address || at.bytes_now != at.bytes);
}

ledger_entry address_ledger::entry_of(const row& of_tensor, operand_kind operand) {
  const place& at = of_tensor.places[static_cast<std::size_t>(operand)];
  return {of_tensor.tensor, operand,      at.address, at.now,
          at.bytes,         at.bytes_now, at.freed,   at.generation};
}

address_ledger::row& address_ledger::find(tensor_id tensor) {
  if (tensor < rows_.size()) return rows_[tensor];
  throw usage_error(
      fmt::format("tensor {} does not exist, the plan has {} tensors", tensor, rows_.size()));
}

address_ledger::place& address_ledger::find(tensor_id tensor, operand_kind operand) {
  row& of_tensor = find(tensor);
  place& found = of_tensor.places[static_cast<std::size_t>(operand)];
  if (found.exists) return found;
  throw usage_error(fmt::format("tensor '{}': has no {}", of_tensor.tensor, name_of(operand)));
}

template <class Change>
void address_ledger::change(place& at, Change&& change) {
  const bool before = is_stale(at);
  change(at);
  const bool after = is_stale(at);
  if (after && !before) stale_.fetch_add(1, std::memory_order_release);
  if (before && !after) stale_.fetch_sub(1, std::memory_order_release);
}

void address_ledger::moved(tensor_id tensor, operand_kind operand, const void* address) {
  const std::lock_guard lock(mutex_);
  change(find(tensor, operand), [&](place& at) {
    at.now = address;
    at.freed = false;
  });
}

void address_ledger::freed(tensor_id tensor, operand_kind operand) {
  const std::lock_guard lock(mutex_);
  change(find(tensor, operand), [](place& at) { at.freed = true; });
}

void address_ledger::freed(tensor_id tensor) {
  const std::lock_guard lock(mutex_);
  for (place& at : find(tensor).places) {
    if (at.exists) change(at, [](place& gone) { gone.freed = true; });
  }
}

void address_ledger::resized(tensor_id tensor, operand_kind operand, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  change(find(tensor, operand), [&](place& at) { at.bytes_now = bytes; });
}

ledger_entry address_ledger::entry(tensor_id tensor, operand_kind operand) const {
  const std::lock_guard lock(mutex_);
  static_cast<void>(const_cast<address_ledger*>(this)->find(tensor, operand));
  return entry_of(rows_[tensor], operand);
}

std::vector<ledger_entry> address_ledger::entries() const {
  std::vector<ledger_entry> all;
  static_cast<void>(first([&](const ledger_entry& entry) {
    all.push_back(entry);
    return false;
  }));
  return all;
}

template <class Wanted>
std::optional<ledger_entry> address_ledger::first(Wanted&& wanted) const {
  const std::lock_guard lock(mutex_);
  for (const row& of_tensor : rows_) {
    for (std::size_t i = 0; i < operand_kinds; ++i) {
      if (!of_tensor.places[i].exists) continue;
      ledger_entry entry = entry_of(of_tensor, static_cast<operand_kind>(i));
      if (wanted(entry)) return entry;
    }
  }
  return std::nullopt;
}

namespace detail {
namespace {

std::string what_is_wrong(const ledger_entry& entry) {
  const char* const operand = name_of(entry.operand);
  if (entry.freed) {
    return fmt::format("tensor '{}': {} was freed, the step has it at {}", entry.tensor, operand,
                       entry.address);
  }
  if (entry.bytes_now != entry.bytes) {
    return fmt::format("tensor '{}': {} at {} was resized to {} bytes, the step has {} bytes at {}",
                       entry.tensor, operand, entry.now, entry.bytes_now, entry.bytes,
                       entry.address);
  }
  return fmt::format("tensor '{}': {} is at {} now, the step has it at {}", entry.tensor, operand,
                     entry.now, entry.address);
}

}  // namespace

ledger_access::rows ledger_access::rows_of(const step_plan& plan,
                                           const std::vector<tensor_descriptor>& tensors,
                                           const address_ledger& before) {
  const std::lock_guard lock(before.mutex_);
  std::unordered_map<std::string_view, const address_ledger::row*> known;
  for (const address_ledger::row& old : before.rows_) known.emplace(old.tensor, &old);
  rows next(plan.tensors.size());
  for (std::size_t t = 0; t < next.size(); ++t) {
    next[t].tensor = plan.tensors[t].operands.name;
    const auto found = known.find(next[t].tensor);
    for (std::size_t i = 0; i < operand_kinds; ++i) {
      const auto operand = static_cast<operand_kind>(i);
      const storage_format format = format_of(tensors[t].signature, operand);
      if (format == storage_format::none) continue;
      address_ledger::place& at = next[t].places[i];
      at.exists = true;
      at.address = at.now = address_in(tensors[t], operand);
      at.bytes = at.bytes_now = tensors[t].numel * element_size(format);
      at.generation = 1;
      if (found == known.end() || !found->second->places[i].exists) continue;
      const address_ledger::place& old = found->second->places[i];
      at.generation = old.generation + (old.address == at.address ? 0 : 1);
    }
  }
  return next;
}

void ledger_access::replace(address_ledger& ledger, rows& next) noexcept {
  const std::lock_guard lock(ledger.mutex_);
  ledger.rows_.swap(next);
  ledger.stale_.store(0, std::memory_order_release);
}

void ledger_access::bound(address_ledger& ledger, tensor_id tensor, operand_kind operand,
                          const void* address) {
  const std::lock_guard lock(ledger.mutex_);
  ledger.change(ledger.find(tensor, operand), [&](address_ledger::place& at) {
    if (at.address != address) ++at.generation;
    at.address = at.now = address;
    at.freed = false;
  });
}

void ledger_access::check_size(const address_ledger& ledger, tensor_id tensor,
                               operand_kind operand) {
  const ledger_entry entry = ledger.entry(tensor, operand);
  if (entry.bytes == entry.bytes_now) return;
  throw usage_error(fmt::format(
      "tensor '{}': {} was resized to {} bytes and cannot be re-bound, expected the {} bytes of "
      "the plan: update the executor to a plan of the new size",
      entry.tensor, name_of(operand), entry.bytes_now, entry.bytes));
}

std::string ledger_access::why_stale(const address_ledger& ledger) {
  const std::optional<ledger_entry> entry = ledger.first(std::mem_fn(&ledger_entry::stale));
  if (!entry) return {};
  const std::uint64_t others = ledger.stale() - 1;
  return fmt::format(
      "{}{}: {} before the next launch", what_is_wrong(*entry),
      others == 0 ? std::string() : fmt::format(", and {} more operands are stale", others),
      entry->bytes_now == entry->bytes ? "rebind it, or update the executor"
                                       : "update the executor to a plan of the new size");
}

std::string ledger_access::why_not_rebindable(const address_ledger& ledger) {
  if (ledger.stale() == 0) return {};
  const std::optional<ledger_entry> entry = ledger.first([](const ledger_entry& candidate) {
    return candidate.stale() && (candidate.freed || candidate.bytes_now != candidate.bytes);
  });
  return entry ? what_is_wrong(*entry) : std::string();
}

}  // namespace detail
}  // namespace stepgraph
