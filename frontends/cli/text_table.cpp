#include "text_table.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace stepgraph::cli {

std::string aligned(const std::vector<std::vector<std::string>>& rows, std::size_t left) {
  std::vector<std::size_t> widths;
  for (const std::vector<std::string>& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const std::vector<std::string>& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      const char* gap = i == 0 ? "" : "  ";
      text += i < left ? fmt::format("{}{:<{}}", gap, row[i], widths[i])
                       : fmt::format("{}{:>{}}", gap, row[i], widths[i]);
    }
    text += "\n";
  }
  return text;
}

std::string grouped(std::uint64_t value) {
  std::string text = std::to_string(value);
  for (std::size_t end = text.size(); end > 3; end -= 3) text.insert(end - 3, 1, ',');
  return text;
}

}  // namespace stepgraph::cli
