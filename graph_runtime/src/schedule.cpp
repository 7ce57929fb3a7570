#include "stepgraph/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "schedule_checks.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph {
namespace {

/// The entries that a segment reads lie inside the table and are numbers it can use.
void check_entries(const schedule& checked, const schedule_segment& segment,
                   const std::string& subject) {
  const std::uint64_t offset = segment.table_offset;
  const std::uint64_t size = checked.table.size();
  if (offset > size || segment.table_count > size - offset) {
    throw usage_error(fmt::format(
        "{}: reads {} entries from table[{}] on, expected no more than the {} that the table has",
        subject, segment.table_count, offset, size));
  }
  const std::span entries = std::span(checked.table).subspan(offset, segment.table_count);
  detail::require_entries(subject, "entry", entries);
  if (segment.curve == schedule_curve::milestone_decay &&
      !std::is_sorted(entries.begin(), entries.end())) {
    throw usage_error(
        fmt::format("{}: a milestone is less than the one before, expected none to "
                    "fall",
                    subject));
  }
}

void check_segment(const schedule& checked, const schedule_segment& segment,
                   const std::string& subject) {
  detail::require_count(subject, "begin", segment.begin, 0);
  detail::require_not_negative(subject, "multiplier", segment.multiplier);
  detail::require_not_negative(subject, "from", segment.from);
  detail::require_not_negative(subject, "to", segment.to);
  detail::require_not_negative(subject, "ratio", segment.ratio);
  if (!std::isfinite(segment.origin)) {
    throw usage_error(
        fmt::format("{}: origin is {}, expected a finite number", subject, segment.origin));
  }
  detail::require_positive(subject, "length", segment.length);
  switch (segment.curve) {
    case schedule_curve::constant:
    case schedule_curve::linear:
    case schedule_curve::rise_cosine:
    case schedule_curve::anneal_linear:
    case schedule_curve::anneal_cosine:
    case schedule_curve::anneal_exponential:
    case schedule_curve::anneal_minus_sqrt:
    case schedule_curve::anneal_polynomial:
    case schedule_curve::inverse_square_root:
      return;
    case schedule_curve::cosine_wave:
    case schedule_curve::step_decay:
      detail::require_count(subject, "period", segment.period);
      return;
    case schedule_curve::cosine_restarts:
      detail::require_count(subject, "period", segment.period);
      if (segment.ratio < 1.0 || segment.ratio != std::floor(segment.ratio)) {
        throw usage_error(fmt::format("{}: ratio is {}, expected a whole number of at least 1",
                                      subject, segment.ratio));
      }
      return;
    case schedule_curve::table:
      detail::require_table(subject, "table", segment.table_count);
      [[fallthrough]];
    case schedule_curve::milestone_decay:
      check_entries(checked, segment, subject);
      return;
  }
  throw usage_error(fmt::format("{}: curve is {}, expected a schedule_curve", subject,
                                static_cast<std::uint32_t>(segment.curve)));
}

}  // namespace

void validate(const schedule& checked) {
  const std::vector<schedule_segment>& segments = checked.segments;
  if (segments.empty()) throw usage_error("schedule: has no segments, expected at least 1");
  if (segments.front().begin != 0) {
    throw usage_error(
        fmt::format("schedule: segment 0: begin is {}, expected 0", segments.front().begin));
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (i > 0 && segments[i].begin <= segments[i - 1].begin) {
      throw usage_error(
          fmt::format("schedule: segment {}: begin is {}, expected more than the {} of the segment "
                      "before",
                      i, segments[i].begin, segments[i - 1].begin));
    }
    check_segment(checked, segments[i], fmt::format("schedule: segment {}", i));
  }
}

double value_at(const schedule& evaluated, std::uint64_t clock) {
  if (evaluated.segments.empty()) {
    throw usage_error("schedule: has no segments, expected at least 1");
  }
  return math::value_at(evaluated.segments.data(),
                        static_cast<std::uint32_t>(evaluated.segments.size()),
                        evaluated.table.data(), clock);
}

namespace schedules {

schedule constant(double value, schedule_clock clock) {
  detail::require_not_negative("constant", "value", value);
  return {.segments = {detail::constant_segment(0, value)}, .table = {}, .clock = clock};
}

schedule table(std::vector<double> values, schedule_clock clock) {
  detail::require_entries("table", "values", values);
  const schedule_segment segment = {
      .curve = schedule_curve::table,
      .table_count = detail::require_table("table", "values", values.size())};
  return {.segments = {segment}, .table = std::move(values), .clock = clock};
}

schedule sequence(const std::vector<schedule>& parts,
                  const std::vector<std::uint64_t>& milestones) {
  if (parts.empty()) throw usage_error("sequence: has no parts, expected at least 1");
  if (milestones.size() + 1 != parts.size()) {
    throw usage_error(fmt::format("sequence: has {} milestones, expected {}, one fewer than parts",
                                  milestones.size(), parts.size() - 1));
  }
  schedule result;
  result.clock = parts.front().clock;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const schedule& part = parts[i];
    validate(part);
    if (part.clock != result.clock) {
      throw usage_error(fmt::format("sequence: part {} counts other units than part 0", i));
    }
    const std::uint64_t before = i < 2 ? 0 : milestones[i - 2];
    const std::uint64_t begin = i == 0 ? 0 : milestones[i - 1];
    if (i > 0 && (begin <= before || begin > detail::largest_exact_count)) {
      throw usage_error(
          fmt::format("sequence: milestone {} is {}, expected more than {} and at most 2^53", i - 1,
                      begin, before));
    }
    for (schedule_segment segment : part.segments) {
      segment.begin += begin;
      segment.table_offset += result.table.size();
      if (i < milestones.size() && segment.begin >= milestones[i]) break;
      result.segments.push_back(segment);
    }
    result.table.insert(result.table.end(), part.table.begin(), part.table.end());
  }
  return result;
}

schedule scaled(schedule unscaled, double multiplier) {
  detail::require_not_negative("scaled", "multiplier", multiplier);
  for (schedule_segment& segment : unscaled.segments) segment.multiplier *= multiplier;
  return unscaled;
}

}  // namespace schedules
}  // namespace stepgraph
