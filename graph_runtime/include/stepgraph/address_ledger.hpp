#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "stepgraph/operand_kind.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph {

namespace detail {
class ledger_access;
}

/// What the ledger knows of one operand.
struct ledger_entry {
  std::string tensor;
  operand_kind operand = operand_kind::parameter;
  const void* address = nullptr;  ///< where the step reads and writes it
  const void* now = nullptr;      ///< where it is, as far as the ledger was told
  std::uint64_t bytes = 0;        ///< that the step reads and writes
  std::uint64_t bytes_now = 0;
  bool freed = false;            ///< it has no memory now
  std::uint64_t generation = 0;  ///< addresses the step has had for it, from 1

  /// The step must not run with it. An empty operand never is: no step looks at it.
  bool stale() const noexcept {
    return bytes != 0 && (freed || now != address || bytes_now != bytes);
  }
};

/// Where the operands of a live executor are, and whether its step still has them right.
///
/// A captured step holds plain addresses; nothing on the device can tell that a framework has moved
/// or freed a tensor since. Whoever does so says it here, and the next launch is refused until
/// `executor::rebind` or an update has brought the step up to date. The check before a launch is
/// one load, whatever the number of operands.
///
/// Every function may be called from any thread between two launches, and throws usage_error for a
/// tensor or an operand that the plan does not have.
class address_ledger {
 public:
  address_ledger() = default;
  address_ledger(const address_ledger&) = delete;
  address_ledger& operator=(const address_ledger&) = delete;

  /// The operand is at `address` now, of the same size. At the address that the step has it is up
  /// to date again.
  void moved(tensor_id tensor, operand_kind operand, const void* address);
  /// The operand has no memory any more.
  void freed(tensor_id tensor, operand_kind operand);
  /// No operand of the tensor has.
  void freed(tensor_id tensor);
  /// The operand holds `bytes` bytes now. Re-binding cannot follow that, an update can.
  void resized(tensor_id tensor, operand_kind operand, std::uint64_t bytes);

  /// Operands that are not as the step has them.
  std::uint64_t stale() const noexcept { return stale_.load(std::memory_order_acquire); }

  ledger_entry entry(tensor_id tensor, operand_kind operand) const;
  /// Of every operand that the plan has, tensor by tensor.
  std::vector<ledger_entry> entries() const;

 private:
  friend class detail::ledger_access;

  struct place {
    bool exists = false;
    bool freed = false;
    const void* address = nullptr;
    const void* now = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t bytes_now = 0;
    std::uint64_t generation = 0;
  };
  struct row {
    std::string tensor;
    std::array<place, operand_kinds> places;
  };

  static bool is_stale(const place& at) noexcept;
  static ledger_entry entry_of(const row& of_tensor, operand_kind operand);
  // These are called under the lock.
  row& find(tensor_id tensor);
  place& find(tensor_id tensor, operand_kind operand);
  template <class Change>
  void change(place& at, Change&& change);
  /// The first operand for which `wanted` holds, in the order of entries().
  template <class Wanted>
  std::optional<ledger_entry> first(Wanted&& wanted) const;

  mutable std::mutex mutex_;
  std::atomic<std::uint64_t> stale_ = 0;
  std::vector<row> rows_;
};

}  // namespace stepgraph
