#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stepgraph::cli {

/// Rows of equal length as lines of aligned columns: the first `left` columns to the left, the
/// others to the right.
std::string aligned(const std::vector<std::vector<std::string>>& rows, std::size_t left);

/// 124439808 as "124,439,808".
std::string grouped(std::uint64_t value);

}  // namespace stepgraph::cli
