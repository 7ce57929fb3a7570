#include "pending_changes.hpp"

#include "stepgraph/error.hpp"

namespace stepgraph::detail {

pending_changes::pending_changes(std::size_t groups)
    : groups_(groups), slots_((groups + 1) * fields, 0) {
  entries_.reserve((groups + 1) * fields);
}

void pending_changes::check_open() const {
  if (closed_) throw usage_error("the executor was released");
}

void pending_changes::put(const setting& entry) {
  std::uint32_t& slot = slot_of(entry.group, entry.field);
  if (slot == 0) {
    entries_.push_back(entry);
    slot = static_cast<std::uint32_t>(entries_.size());
  } else {
    entries_[slot - 1] = entry;
  }
  any_.store(true, std::memory_order_release);
}

void pending_changes::set(std::uint32_t group, setting_field field, double value) {
  const std::lock_guard lock(mutex_);
  check_open();
  put({group, field, value});
}

void pending_changes::give_back(const std::vector<setting>& settings) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const setting& entry : settings) {
    if (slot_of(entry.group, entry.field) == 0) put(entry);
  }
}

void pending_changes::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

}  // namespace stepgraph::detail
