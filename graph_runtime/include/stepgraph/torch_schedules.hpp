#pragma once

#include <cstdint>
#include <vector>

#include "stepgraph/schedule.hpp"

/// The schedulers of torch.optim.lr_scheduler, under torch's names and with torch's defaults.
///
/// t is the clock: how often torch's `scheduler.step()` was called before this optimizer step,
/// which with the usual one call after each step is the number of updates. Values are torch's
/// closed forms, which its step-by-step rules approach but for their accumulated rounding. All
/// functions refuse with usage_error numbers that are not finite or outside the ranges given here.
/// `learning_rate` is torch's base learning rate, at least 0.
///
/// SequentialLR is `sequence`; LambdaLR is `scaled(table(factors), learning_rate)`.
namespace stepgraph::schedules {

struct step_lr_options {
  double learning_rate = required;
  std::uint64_t step_size = 0;  ///< at least 1; no default
  double gamma = 0.1;           ///< at least 0
};

/// learning_rate * gamma^(t / step_size rounded down)
schedule step_lr(const step_lr_options& options);

struct multi_step_lr_options {
  double learning_rate = required;
  std::vector<std::uint64_t> milestones = {};  ///< not falling; a repeated one counts again
  double gamma = 0.1;                          ///< at least 0
};

/// learning_rate * gamma^(number of milestones <= t)
schedule multi_step_lr(const multi_step_lr_options& options);

struct exponential_lr_options {
  double learning_rate = required;
  double gamma = required;  ///< at least 0
};

/// learning_rate * gamma^t
schedule exponential_lr(const exponential_lr_options& options);

struct constant_lr_options {
  double learning_rate = required;
  double factor = 1.0 / 3.0;      ///< in [0, 1]
  std::uint64_t total_iters = 5;  ///< at least 1
};

/// learning_rate * factor while t < total_iters, then learning_rate
schedule constant_lr(const constant_lr_options& options);

struct linear_lr_options {
  double learning_rate = required;
  double start_factor = 1.0 / 3.0;  ///< in (0, 1]
  double end_factor = 1.0;          ///< in [0, 1]
  std::uint64_t total_iters = 5;    ///< at least 1
};

/// learning_rate * (start_factor + (end_factor - start_factor) * min(t / total_iters, 1))
schedule linear_lr(const linear_lr_options& options);

struct polynomial_lr_options {
  double learning_rate = required;
  std::uint64_t total_iters = 5;  ///< at least 1
  double power = 1.0;             ///< at least 0
};

/// learning_rate * (1 - min(t / total_iters, 1))^power
schedule polynomial_lr(const polynomial_lr_options& options);

struct cosine_annealing_lr_options {
  double learning_rate = required;
  std::uint64_t t_max = 0;  ///< at least 1; no default
  double eta_min = 0.0;     ///< at least 0
};

/// eta_min + (learning_rate - eta_min) * (1 + cos(pi * t / t_max)) / 2, which past t_max rises
/// again, as torch's does: a wave of period 2 * t_max.
schedule cosine_annealing_lr(const cosine_annealing_lr_options& options);

struct cosine_annealing_warm_restarts_options {
  double learning_rate = required;
  std::uint64_t t_0 = 0;     ///< steps of the first period, at least 1; no default
  std::uint64_t t_mult = 1;  ///< each period is so many times as long as the one before; at least 1
  double eta_min = 0.0;      ///< at least 0
};

/// eta_min + (learning_rate - eta_min) * (1 + cos(pi * t_cur / t_i)) / 2, t_cur being the steps
/// since the last restart and t_i the length of the period.
schedule cosine_annealing_warm_restarts(const cosine_annealing_warm_restarts_options& options);

enum class anneal_strategy : std::uint8_t { cos, linear };

struct one_cycle_lr_options {
  double max_lr = required;
  std::uint64_t total_steps = 0;  ///< at least 1; no default
  double pct_start = 0.3;         ///< in [0, 1]
  anneal_strategy strategy = anneal_strategy::cos;
  double div_factor = 25.0;       ///< above 0
  double final_div_factor = 1e4;  ///< above 0
  bool three_phase = false;
};

/// The learning rate of OneCycleLR; momentum is not cycled. From max_lr / div_factor up to max_lr
/// at step pct_start * total_steps - 1, in three phases back to max_lr / div_factor at step
/// 2 * pct_start * total_steps - 2, and down to max_lr / div_factor / final_div_factor at step
/// total_steps - 1, between steps where those numbers are not whole.
///
/// Two differences: the last rate holds from total_steps on, where torch first extrapolates and
/// then throws, and where torch divides by zero, since pct_start * total_steps is 1, the first step
/// has max_lr.
schedule one_cycle_lr(const one_cycle_lr_options& options);

}  // namespace stepgraph::schedules
