#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stepgraph/schedule.hpp"

namespace stepgraph::cli {

/// Schedules as asked for on a command line. What is not given depends on the number of steps.
struct schedule_options {
  std::string name;             ///< one of the names of --schedule, or table:FILE
  double learning_rate = 3e-3;  ///< the largest, of every schedule but a table
  std::optional<double> minimum;
  std::optional<std::int64_t> warmup;
  std::optional<std::int64_t> decay_steps;
  std::optional<std::int64_t> wsd_decay_steps;
  std::optional<std::string> wsd_style;
  std::optional<std::int64_t> step_size;
  std::optional<double> gamma;
  std::vector<std::int64_t> milestones;
  std::optional<double> power;
  std::optional<std::int64_t> restart_period;
  std::optional<std::int64_t> restart_factor;
  std::optional<double> rising_share;
  std::optional<double> div_factor;
  std::optional<double> final_div_factor;
  bool three_phase = false;

  double weight_decay = 0.0;  ///< where it is constant, else its first value
  std::string weight_decay_name = "constant";
  std::optional<double> weight_decay_end;
  std::optional<std::int64_t> weight_decay_steps;

  const CLI::App* command = nullptr;  ///< which options were given
};

/// Adds --lr, --schedule, --weight-decay, --weight-decay-schedule and the numbers they take. The
/// values in `options` are the defaults; it must outlive the parsing.
void add_schedule_options(CLI::App& command, schedule_options& options);

/// The learning rate of a training of `steps` steps. A schedule counts updates and reaches its last
/// value in the last step; its warm-up starts above zero, so that no step is wasted. Throws
/// CLI::ValidationError for numbers that do not fit together and for an option that the schedule
/// does not use, stepgraph::error for a table that cannot be read.
schedule learning_rate_of(const schedule_options& options, std::int64_t steps);

/// Likewise the weight decay; nothing if it is constant.
std::optional<schedule> weight_decay_of(const schedule_options& options, std::int64_t steps);

}  // namespace stepgraph::cli
