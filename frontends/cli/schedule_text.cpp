#include "schedule_text.hpp"

#include <fmt/format.h>

#include "digest.hpp"

namespace stepgraph::cli {
namespace {

std::string numbers_of(const schedule_segment& segment, const schedule& described) {
  switch (segment.curve) {
    case schedule_curve::constant:
      return fmt::format("{}", segment.from);
    case schedule_curve::cosine_wave:
      return fmt::format("{} to {}, half a wave in {}", segment.from, segment.to, segment.period);
    case schedule_curve::cosine_restarts:
      return fmt::format("{} to {}, periods of {} times {}", segment.from, segment.to,
                         segment.period, segment.ratio);
    case schedule_curve::inverse_square_root:
      return fmt::format("{}, not below {}, clock from {}", segment.from, segment.to,
                         segment.origin);
    case schedule_curve::step_decay:
      return fmt::format("{} times {} every {}", segment.from, segment.ratio, segment.period);
    case schedule_curve::milestone_decay:
    case schedule_curve::table: {
      const double* entries = described.table.data() + segment.table_offset;
      digest entries_digest;
      entries_digest.add(entries, segment.table_count * sizeof(double));
      return fmt::format("{} times {}, {} entries ({})", segment.from, segment.ratio,
                         segment.table_count, entries_digest.text());
    }
    case schedule_curve::anneal_polynomial:
      return fmt::format("{} to {} over {} from {}, power {}", segment.from, segment.to,
                         segment.length, segment.origin, segment.ratio);
    default:
      return fmt::format("{} to {} over {} from {}", segment.from, segment.to, segment.length,
                         segment.origin);
  }
}

}  // namespace

const char* name_of(schedule_curve curve) {
  switch (curve) {
    case schedule_curve::constant:
      return "constant";
    case schedule_curve::linear:
      return "linear";
    case schedule_curve::rise_cosine:
      return "rise_cosine";
    case schedule_curve::anneal_linear:
      return "anneal_linear";
    case schedule_curve::anneal_cosine:
      return "anneal_cosine";
    case schedule_curve::anneal_exponential:
      return "anneal_exponential";
    case schedule_curve::anneal_minus_sqrt:
      return "anneal_minus_sqrt";
    case schedule_curve::anneal_polynomial:
      return "anneal_polynomial";
    case schedule_curve::cosine_wave:
      return "cosine_wave";
    case schedule_curve::cosine_restarts:
      return "cosine_restarts";
    case schedule_curve::inverse_square_root:
      return "inverse_square_root";
    case schedule_curve::step_decay:
      return "step_decay";
    case schedule_curve::milestone_decay:
      return "milestone_decay";
    case schedule_curve::table:
      return "table";
  }
  return "unknown";
}

std::vector<std::string> describe(const schedule& described) {
  const char* unit = described.clock == schedule_clock::samples ? "sample" : "update";
  std::vector<std::string> lines;
  for (const schedule_segment& segment : described.segments) {
    lines.push_back(fmt::format(
        "from {} {}: {} {}{}", unit, segment.begin, name_of(segment.curve),
        numbers_of(segment, described),
        segment.multiplier == 1.0 ? "" : fmt::format(", all times {}", segment.multiplier)));
  }
  return lines;
}

}  // namespace stepgraph::cli
