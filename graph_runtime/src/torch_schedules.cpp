#include "stepgraph/torch_schedules.hpp"

#include <cmath>
#include <utility>

#include "schedule_checks.hpp"

namespace stepgraph::schedules {
namespace {

/// A schedule of factors, times the base learning rate.
schedule times_learning_rate(const char* function, double learning_rate,
                             std::vector<schedule_segment> segments) {
  detail::require_not_negative(function, "learning_rate", learning_rate);
  return scaled({.segments = std::move(segments), .table = {}}, learning_rate);
}

/// Half a cosine, again and again, between the base learning rate and `eta_min`.
schedule cosines(const char* function, double learning_rate, double eta_min,
                 schedule_segment segment) {
  segment.from = detail::require_not_negative(function, "learning_rate", learning_rate);
  segment.to = detail::require_not_negative(function, "eta_min", eta_min);
  return {.segments = {segment}, .table = {}};
}

/// The first whole step after `time`, from 0 on.
std::uint64_t first_step_after(double time) {
  return time < 0.0 ? 0 : static_cast<std::uint64_t>(std::floor(time)) + 1;
}

}  // namespace

schedule step_lr(const step_lr_options& options) {
  const char* function = "step_lr";
  return times_learning_rate(
      function, options.learning_rate,
      {{.curve = schedule_curve::step_decay,
        .period = detail::require_count(function, "step_size", options.step_size),
        .from = 1.0,
        .ratio = detail::require_not_negative(function, "gamma", options.gamma)}});
}

schedule multi_step_lr(const multi_step_lr_options& options) {
  const char* function = "multi_step_lr";
  const std::vector<std::uint64_t>& milestones = options.milestones;
  schedule result = times_learning_rate(
      function, options.learning_rate,
      {{.curve = schedule_curve::milestone_decay,
        .table_count = detail::require_table(function, "milestones", milestones.size(), 0),
        .from = 1.0,
        .ratio = detail::require_not_negative(function, "gamma", options.gamma)}});
  std::uint64_t before = 0;
  for (const std::uint64_t milestone : milestones) {
    detail::require_count(function, "a milestone", milestone, before);
    result.table.push_back(static_cast<double>(milestone));
    before = milestone;
  }
  return result;
}

schedule exponential_lr(const exponential_lr_options& options) {
  const char* function = "exponential_lr";
  return times_learning_rate(
      function, options.learning_rate,
      {{.curve = schedule_curve::step_decay,
        .period = 1,
        .from = 1.0,
        .ratio = detail::require_not_negative(function, "gamma", options.gamma)}});
}

schedule constant_lr(const constant_lr_options& options) {
  const char* function = "constant_lr";
  const double factor = detail::require_fraction(function, "factor", options.factor);
  const std::uint64_t total = detail::require_count(function, "total_iters", options.total_iters);
  return times_learning_rate(
      function, options.learning_rate,
      {detail::constant_segment(0, factor), detail::constant_segment(total, 1.0)});
}

schedule linear_lr(const linear_lr_options& options) {
  const char* function = "linear_lr";
  const double start = detail::require_fraction(function, "start_factor", options.start_factor);
  detail::require_positive(function, "start_factor", start);
  const double end = detail::require_fraction(function, "end_factor", options.end_factor);
  const std::uint64_t total = detail::require_count(function, "total_iters", options.total_iters);
  return times_learning_rate(function, options.learning_rate,
                             {{.curve = schedule_curve::linear,
                               .from = start,
                               .to = end,
                               .length = static_cast<double>(total)}});
}

schedule polynomial_lr(const polynomial_lr_options& options) {
  const char* function = "polynomial_lr";
  const double power = detail::require_not_negative(function, "power", options.power);
  const std::uint64_t total = detail::require_count(function, "total_iters", options.total_iters);
  return times_learning_rate(function, options.learning_rate,
                             {{.curve = schedule_curve::anneal_polynomial,
                               .from = 1.0,
                               .length = static_cast<double>(total),
                               .ratio = power}});
}

schedule cosine_annealing_lr(const cosine_annealing_lr_options& options) {
  const char* function = "cosine_annealing_lr";
  return cosines(function, options.learning_rate, options.eta_min,
                 {.curve = schedule_curve::cosine_wave,
                  .period = detail::require_count(function, "t_max", options.t_max)});
}

schedule cosine_annealing_warm_restarts(const cosine_annealing_warm_restarts_options& options) {
  const char* function = "cosine_annealing_warm_restarts";
  return cosines(
      function, options.learning_rate, options.eta_min,
      {.curve = schedule_curve::cosine_restarts,
       .period = detail::require_count(function, "t_0", options.t_0),
       .ratio = static_cast<double>(detail::require_count(function, "t_mult", options.t_mult))});
}

schedule one_cycle_lr(const one_cycle_lr_options& options) {
  const char* function = "one_cycle_lr";
  const double high = detail::require_not_negative(function, "max_lr", options.max_lr);
  const double initial =
      high / detail::require_positive(function, "div_factor", options.div_factor);
  const double low =
      initial / detail::require_positive(function, "final_div_factor", options.final_div_factor);
  const auto total =
      static_cast<double>(detail::require_count(function, "total_steps", options.total_steps));
  const double rise = detail::require_fraction(function, "pct_start", options.pct_start) * total;

  // Each phase begins where the one before ends, which may be between two steps or before step 0.
  schedule result;
  double start = 0.0;
  std::uint64_t begin = 0;
  const auto append_phase = [&](double end, double from, double to) {
    schedule_segment segment = detail::constant_segment(begin, to);
    if (end != start) {
      segment.curve = options.strategy == anneal_strategy::cos ? schedule_curve::anneal_cosine
                                                               : schedule_curve::linear;
      segment.from = from;
      segment.to = to;
      segment.origin = start - static_cast<double>(begin);
      segment.length = end - start;
    }
    detail::append_segment(result, segment);
    start = end;
    begin = first_step_after(end);
  };
  append_phase(rise - 1.0, initial, high);
  if (options.three_phase) append_phase(2.0 * rise - 2.0, high, initial);
  append_phase(total - 1.0, options.three_phase ? initial : high, low);
  detail::append_segment(result, detail::constant_segment(options.total_steps, low));
  return result;
}

}  // namespace stepgraph::schedules
