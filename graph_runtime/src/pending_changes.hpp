#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "stepgraph/math/step_scalars.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::detail {

/// A group of the plan before an update that the plan after it does not have.
inline constexpr std::uint32_t no_group = 0xffffffffu;

/// Which parts of the step's memory differ from what the host holds.
struct changed_parts {
  bool tensors = false;  ///< the tensor table
  bool options = false;  ///< what no setting can change, of groups and of the whole step
};

/// Values set by hand and tables changed since the last launch. Written by any thread, taken by
/// the launching one. Its lock also guards the plan and the tables of the executor, so that what a
/// setter checks and what it changes belong to one plan.
///
/// Keeps only the latest value of each field of each group, so that its size is bounded whatever
/// the number of calls, and so that a batch can be applied in any order.
class pending_changes {
 public:
  explicit pending_changes(std::size_t groups);

  /// The lock, held, and what may be done under it.
  class access {
   public:
    /// Throws usage_error after `close`, here and not in the constructor, so that a closed one can
    /// still be looked at.
    void check_open() const;
    bool closed() const noexcept { return changes_.closed_; }
    void set(std::uint32_t group, setting_field field, double value);
    void add(const changed_parts& parts) noexcept;
    /// From now on every change is refused.
    void close() noexcept { changes_.closed_ = true; }

   private:
    friend class pending_changes;
    explicit access(pending_changes& changes) : changes_(changes), lock_(changes.mutex_) {}

    pending_changes& changes_;
    std::unique_lock<std::mutex> lock_;
  };

  access lock() { return access(*this); }
  /// For changes: throws usage_error after `close`.
  access lock_open();

  /// True if there may be something to take; costs one load.
  bool any() const noexcept { return any_.load(std::memory_order_acquire); }

  /// Moves the settings to `settings` (cleared first) and calls `take_parts` with the changed parts
  /// under the lock if there are any. If `take_parts` throws, everything stays pending.
  template <class TakeParts>
  void take(std::vector<setting>& settings, TakeParts&& take_parts) {
    const std::lock_guard lock(mutex_);
    settings.clear();
    if (changed_.tensors || changed_.options) take_parts(changed_);
    changed_ = {};
    for (const setting& entry : entries_) slot_of(entry.group, entry.field) = 0;
    settings.swap(entries_);
    any_.store(false, std::memory_order_release);
  }

  /// Puts settings back that were taken and not delivered; newer values win.
  void give_back(const std::vector<setting>& settings);

  /// What an update makes of the values that are pending, with all the memory it needs.
  class replacement {
   public:
    /// `group_of_next` names the group before the update of each group after it, or no_group.
    /// Values of the fields that `decided` names are dropped: the new plan decided them.
    replacement(std::size_t groups_before, const std::vector<std::uint32_t>& group_of_next,
                const std::vector<setting>& decided);

   private:
    friend class pending_changes;
    std::vector<std::uint32_t> group_now_;  ///< of each group before
    std::vector<setting> decided_;
    std::vector<setting> entries_;
    std::vector<std::uint32_t> slots_;
  };

  /// The plan of another set of groups takes over. `deliver`: the decided values become pending
  /// beside `parts`; otherwise the step was built with them, and nothing else is pending.
  void replace(const access&, replacement& next, bool deliver, const changed_parts& parts) noexcept;

 private:
  static constexpr std::size_t fields = setting_fields;

  std::size_t groups() const noexcept { return slots_.size() / fields - 1; }
  std::uint32_t& slot_of(std::uint32_t group, setting_field field) {
    const std::size_t row = group == whole_step ? groups() : group;
    // A value set by hand and the return to the schedule are one choice; the later wins.
    if (field == setting_field::resume_learning_rate) field = setting_field::learning_rate;
    if (field == setting_field::resume_weight_decay) field = setting_field::weight_decay;
    return slots_[row * fields + static_cast<std::size_t>(field)];
  }
  void put(const setting& entry);

  std::mutex mutex_;
  std::atomic<bool> any_ = false;
  changed_parts changed_;
  bool closed_ = false;
  std::vector<setting> entries_;
  std::vector<std::uint32_t> slots_;  ///< 1 + index in entries_ of each field; 0: none
};

}  // namespace stepgraph::detail
