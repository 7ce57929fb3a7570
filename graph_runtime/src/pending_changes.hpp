#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "stepgraph/math/step_scalars.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::detail {

/// Values set by hand and tables changed since the last launch. Written by any thread, taken by
/// the launching one.
///
/// Keeps only the latest value of each field of each group, so that its size is bounded whatever
/// the number of calls, and so that a batch can be applied in any order.
class pending_changes {
 public:
  explicit pending_changes(std::size_t groups);

  /// Throws usage_error after `close`.
  void set(std::uint32_t group, setting_field field, double value);

  /// Calls `change` under the lock and remembers that the tables changed. Throws usage_error after
  /// `close`.
  template <class Change>
  void change_tables(Change&& change) {
    const std::lock_guard lock(mutex_);
    check_open();
    change();
    tables_changed_ = true;
    any_.store(true, std::memory_order_release);
  }

  /// True if there may be something to take; costs one load.
  bool any() const noexcept { return any_.load(std::memory_order_acquire); }

  /// Moves the settings to `settings` (cleared first) and calls `take_tables` under the lock if the
  /// tables changed. If `take_tables` throws, everything stays pending.
  template <class TakeTables>
  void take(std::vector<setting>& settings, TakeTables&& take_tables) {
    const std::lock_guard lock(mutex_);
    settings.clear();
    if (tables_changed_) take_tables();
    tables_changed_ = false;
    for (const setting& entry : entries_) slot_of(entry.group, entry.field) = 0;
    settings.swap(entries_);
    any_.store(false, std::memory_order_release);
  }

  /// Puts settings back that were taken and not delivered; newer values win.
  void give_back(const std::vector<setting>& settings);

  /// From now on every change is refused.
  void close();

 private:
  static constexpr std::size_t fields = setting_fields;

  std::uint32_t& slot_of(std::uint32_t group, setting_field field) {
    const std::size_t row = group == whole_step ? groups_ : group;
    // A value set by hand and the return to the schedule are one choice; the later wins.
    if (field == setting_field::resume_learning_rate) field = setting_field::learning_rate;
    if (field == setting_field::resume_weight_decay) field = setting_field::weight_decay;
    return slots_[row * fields + static_cast<std::size_t>(field)];
  }
  void check_open() const;
  void put(const setting& entry);

  std::mutex mutex_;
  std::atomic<bool> any_ = false;
  bool tables_changed_ = false;
  bool closed_ = false;
  std::size_t groups_;
  std::vector<setting> entries_;
  std::vector<std::uint32_t> slots_;  ///< 1 + index in entries_ of each field; 0: none
};

}  // namespace stepgraph::detail
