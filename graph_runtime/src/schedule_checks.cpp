#include "schedule_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "stepgraph/error.hpp"

namespace stepgraph::detail {
namespace {

double require(bool holds, std::string_view subject, std::string_view option, double value,
               std::string_view expected) {
  if (!holds) {
    throw usage_error(fmt::format("{}: {} is {}, expected {}", subject, option, value, expected));
  }
  return value;
}

bool finite_and_not_negative(double value) { return std::isfinite(value) && value >= 0.0; }

}  // namespace

double require_not_negative(std::string_view subject, std::string_view option, double value) {
  return require(finite_and_not_negative(value), subject, option, value,
                 "a finite number of at least 0");
}

double require_positive(std::string_view subject, std::string_view option, double value) {
  return require(std::isfinite(value) && value > 0.0, subject, option, value,
                 "a finite number above 0");
}

double require_fraction(std::string_view subject, std::string_view option, double value) {
  return require(value >= 0.0 && value <= 1.0, subject, option, value, "a number in [0, 1]");
}

std::uint64_t require_count(std::string_view subject, std::string_view option, std::uint64_t value,
                            std::uint64_t least) {
  if (value < least || value > largest_exact_count) {
    throw usage_error(fmt::format("{}: {} is {}, expected a whole number from {} to 2^53", subject,
                                  option, value, least));
  }
  return value;
}

std::uint32_t require_table(std::string_view subject, std::string_view option, std::size_t size,
                            std::uint32_t least) {
  if (size < least || size > std::numeric_limits<std::uint32_t>::max()) {
    throw usage_error(fmt::format("{}: {} has {} entries, expected at least {} and less than 2^32",
                                  subject, option, size, least));
  }
  return static_cast<std::uint32_t>(size);
}

void require_entries(std::string_view subject, std::string_view option,
                     std::span<const double> entries) {
  const auto refused = std::find_if_not(entries.begin(), entries.end(), finite_and_not_negative);
  if (refused == entries.end()) return;
  require_not_negative(subject, fmt::format("{}[{}]", option, refused - entries.begin()), *refused);
}

schedule_segment constant_segment(std::uint64_t begin, double value) {
  return {.begin = begin, .from = value};
}

void append_segment(schedule& extended, const schedule_segment& segment) {
  while (!extended.segments.empty() && extended.segments.back().begin >= segment.begin) {
    extended.segments.pop_back();
  }
  extended.segments.push_back(segment);
}

}  // namespace stepgraph::detail
