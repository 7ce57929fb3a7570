#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "stepgraph/schedule.hpp"

/// What the functions that make schedules have in common. The checks throw usage_error with the
/// name of the function and of its option, what was expected and what was found, and return the
/// value.
namespace stepgraph::detail {

/// Up to here whole numbers are exact in double.
inline constexpr std::uint64_t largest_exact_count = std::uint64_t{1} << 53;

double require_not_negative(std::string_view subject, std::string_view option, double value);
double require_positive(std::string_view subject, std::string_view option, double value);
double require_fraction(std::string_view subject, std::string_view option, double value);

/// In [least, 2^53].
std::uint64_t require_count(std::string_view subject, std::string_view option, std::uint64_t value,
                            std::uint64_t least = 1);

/// The size of a table, in [least, 2^32).
std::uint32_t require_table(std::string_view subject, std::string_view option, std::size_t size,
                            std::uint32_t least = 1);

/// Every entry finite and at least 0.
void require_entries(std::string_view subject, std::string_view option,
                     std::span<const double> entries);

schedule_segment constant_segment(std::uint64_t begin, double value);

/// Appends a segment, after removing those that it leaves no time to be active.
void append_segment(schedule& extended, const schedule_segment& segment);

}  // namespace stepgraph::detail
