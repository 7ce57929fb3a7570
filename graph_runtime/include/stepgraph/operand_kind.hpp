#pragma once

#include <cstdint>

namespace stepgraph {

/// Which memory of a tensor is meant.
enum class operand_kind : std::uint8_t {
  parameter,
  gradient,
  master,
  exp_avg,
  exp_avg_sq,
  max_exp_avg_sq,
};
inline constexpr std::uint32_t operand_kinds = 6;

/// "parameter", "gradient", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq".
const char* name_of(operand_kind kind);

}  // namespace stepgraph
