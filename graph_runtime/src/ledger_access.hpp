#pragma once

#include <optional>
#include <string>
#include <vector>

#include "stepgraph/address_ledger.hpp"
#include "stepgraph/kernels/tensor_table.hpp"

namespace stepgraph::detail {

/// What only the executor that owns a ledger does with it.
class ledger_access {
 public:
  using rows = std::vector<address_ledger::row>;

  /// The rows of a plan whose tensors lie where `tensors` says. Operands of `before` keep counting
  /// generations.
  static rows rows_of(const step_plan& plan, const std::vector<tensor_descriptor>& tensors,
                      const address_ledger& before);
  /// The rows of another plan: everything is where that says.
  static void replace(address_ledger& ledger, rows& next) noexcept;

  /// The step has the operand at `address` from the next launch on.
  static void bound(address_ledger& ledger, tensor_id tensor, operand_kind operand,
                    const void* address);
  /// Throws usage_error if the operand was resized.
  static void check_size(const address_ledger& ledger, tensor_id tensor, operand_kind operand);

  /// What is wrong with the first stale operand and what to do; empty if none is stale.
  static std::string why_stale(const address_ledger& ledger);
  /// Why re-binding alone may not help; empty if it does.
  static std::string why_not_rebindable(const address_ledger& ledger);
};

}  // namespace stepgraph::detail
