#include "pending_changes.hpp"

#include "stepgraph/error.hpp"

namespace stepgraph::detail {

pending_changes::pending_changes(std::size_t groups) : slots_((groups + 1) * fields, 0) {
  entries_.reserve(slots_.size());
}

pending_changes::access pending_changes::lock_open() {
  access locked(*this);
  locked.check_open();
  return locked;
}

void pending_changes::access::check_open() const {
  if (changes_.closed_) throw usage_error("the executor was released");
}

void pending_changes::access::set(std::uint32_t group, setting_field field, double value) {
  changes_.put({group, field, value});
}

void pending_changes::access::add(const changed_parts& parts) noexcept {
  changes_.changed_.tensors |= parts.tensors;
  changes_.changed_.options |= parts.options;
  changes_.any_.store(true, std::memory_order_release);
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

void pending_changes::give_back(const std::vector<setting>& settings) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const setting& entry : settings) {
    if (slot_of(entry.group, entry.field) == 0) put(entry);
  }
}

pending_changes::replacement::replacement(std::size_t groups_before,
                                          const std::vector<std::uint32_t>& group_of_next,
                                          const std::vector<setting>& decided)
    : group_now_(groups_before, no_group),
      decided_(decided),
      slots_((group_of_next.size() + 1) * fields, 0) {
  for (std::uint32_t next = 0; next < group_of_next.size(); ++next) {
    if (group_of_next[next] != no_group) group_now_[group_of_next[next]] = next;
  }
  // One entry a slot: `replace` never allocates.
  entries_.reserve(slots_.size());
}

void pending_changes::replace(const access&, replacement& next, bool deliver,
                              const changed_parts& parts) noexcept {
  entries_.swap(next.entries_);
  slots_.swap(next.slots_);
  // The decided values take their slots first, so that older values find them taken.
  constexpr std::uint32_t taken = 0xffffffffu;
  for (const setting& entry : next.decided_) {
    if (deliver) {
      put(entry);
    } else {
      slot_of(entry.group, entry.field) = taken;
    }
  }
  for (setting entry : next.entries_) {
    if (entry.group != whole_step) {
      const std::uint32_t group = next.group_now_[entry.group];
      if (group == no_group) continue;
      entry.group = group;
    }
    if (slot_of(entry.group, entry.field) == 0) put(entry);
  }
  if (!deliver) {
    for (const setting& entry : next.decided_) slot_of(entry.group, entry.field) = 0;
    changed_ = {};
  }
  changed_.tensors |= parts.tensors;
  changed_.options |= parts.options;
  any_.store(!entries_.empty() || changed_.tensors || changed_.options, std::memory_order_release);
}

}  // namespace stepgraph::detail
