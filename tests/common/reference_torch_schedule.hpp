#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <vector>

#include "stepgraph/torch_schedules.hpp"

/// torch.optim.lr_scheduler as a training runs it: the rates of the first `count` steps, each found
/// from the one before by the rule that the scheduler applies to the optimizer's rate.
namespace stepgraph::test {

/// rates[0] = first, rates[t] = next(rates[t - 1], t).
template <class Next>
std::vector<double> step_by_step(std::uint64_t count, double first, Next&& next) {
  std::vector<double> rates(count);
  double rate = first;
  for (std::uint64_t t = 0; t < count; ++t) {
    if (t > 0) rate = next(rate, t);
    rates[t] = rate;
  }
  return rates;
}

inline std::vector<double> reference_rates(const schedules::step_lr_options& options,
                                           std::uint64_t count) {
  return step_by_step(count, options.learning_rate, [&](double rate, std::uint64_t t) {
    return t % options.step_size == 0 ? rate * options.gamma : rate;
  });
}

inline std::vector<double> reference_rates(const schedules::multi_step_lr_options& options,
                                           std::uint64_t count) {
  const auto at_milestone = [&](double rate, std::uint64_t t) {
    const auto times = std::count(options.milestones.begin(), options.milestones.end(), t);
    return times > 0 ? rate * std::pow(options.gamma, static_cast<double>(times)) : rate;
  };
  return step_by_step(count, at_milestone(options.learning_rate, 0), at_milestone);
}

inline std::vector<double> reference_rates(const schedules::exponential_lr_options& options,
                                           std::uint64_t count) {
  return step_by_step(count, options.learning_rate,
                      [&](double rate, std::uint64_t) { return rate * options.gamma; });
}

inline std::vector<double> reference_rates(const schedules::constant_lr_options& options,
                                           std::uint64_t count) {
  return step_by_step(count, options.learning_rate * options.factor,
                      [&](double rate, std::uint64_t t) {
                        return t == options.total_iters ? rate * (1.0 / options.factor) : rate;
                      });
}

inline std::vector<double> reference_rates(const schedules::linear_lr_options& options,
                                           std::uint64_t count) {
  const double change = options.end_factor - options.start_factor;
  const auto total = static_cast<double>(options.total_iters);
  return step_by_step(
      count, options.learning_rate * options.start_factor, [&](double rate, std::uint64_t t) {
        if (t > options.total_iters) return rate;
        const double before = total * options.start_factor + static_cast<double>(t - 1) * change;
        return rate * (1.0 + change / before);
      });
}

inline std::vector<double> reference_rates(const schedules::polynomial_lr_options& options,
                                           std::uint64_t count) {
  const auto total = static_cast<double>(options.total_iters);
  return step_by_step(count, options.learning_rate, [&](double rate, std::uint64_t t) {
    if (t > options.total_iters) return rate;
    const double left = 1.0 - static_cast<double>(t) / total;
    const double left_before = 1.0 - static_cast<double>(t - 1) / total;
    return rate * std::pow(left / left_before, options.power);
  });
}

inline std::vector<double> reference_rates(const schedules::cosine_annealing_lr_options& options,
                                           std::uint64_t count) {
  const auto period = static_cast<double>(options.t_max);
  const double low = options.eta_min;
  const auto height = [&](std::uint64_t t) {
    return 1.0 + std::cos(std::numbers::pi * static_cast<double>(t) / period);
  };
  return step_by_step(count, options.learning_rate, [&](double rate, std::uint64_t t) {
    if (t > options.t_max && (t - 1 - options.t_max) % (2 * options.t_max) == 0) {
      return rate +
             (options.learning_rate - low) * (1.0 - std::cos(std::numbers::pi / period)) / 2.0;
    }
    return height(t) / height(t - 1) * (rate - low) + low;
  });
}

/// What the scheduler uses when a step number is given to it.
inline std::vector<double> reference_closed_form(
    const schedules::cosine_annealing_lr_options& options, std::uint64_t count) {
  return step_by_step(count, options.learning_rate, [&](double, std::uint64_t t) {
    const double angle =
        std::numbers::pi * static_cast<double>(t) / static_cast<double>(options.t_max);
    return options.eta_min +
           (options.learning_rate - options.eta_min) * (1.0 + std::cos(angle)) / 2.0;
  });
}

inline std::vector<double> reference_rates(
    const schedules::cosine_annealing_warm_restarts_options& options, std::uint64_t count) {
  std::uint64_t elapsed = 0;
  std::uint64_t period = options.t_0;
  return step_by_step(count, options.learning_rate, [&](double, std::uint64_t) {
    if (++elapsed == period) {
      elapsed = 0;
      period *= options.t_mult;
    }
    const double angle =
        std::numbers::pi * static_cast<double>(elapsed) / static_cast<double>(period);
    return options.eta_min +
           (options.learning_rate - options.eta_min) * (1.0 + std::cos(angle)) / 2.0;
  });
}

/// For steps up to total_steps - 1; torch throws later.
inline double reference_rate(const schedules::one_cycle_lr_options& options, std::uint64_t step) {
  const double high = options.max_lr;
  const double initial = high / options.div_factor;
  const double low = initial / options.final_div_factor;
  const auto total = static_cast<double>(options.total_steps);
  struct phase {
    double end_step, start, end;
  };
  std::vector<phase> phases = {{options.pct_start * total - 1.0, initial, high},
                               {total - 1.0, high, low}};
  if (options.three_phase) {
    phases = {{options.pct_start * total - 1.0, initial, high},
              {2.0 * options.pct_start * total - 2.0, high, initial},
              {total - 1.0, initial, low}};
  }
  const auto now = static_cast<double>(step);
  std::size_t i = 0;
  while (i + 1 < phases.size() && now > phases[i].end_step) ++i;
  const double start_step = i == 0 ? 0.0 : phases[i - 1].end_step;
  const double part = (now - start_step) / (phases[i].end_step - start_step);
  const double start = phases[i].start;
  const double end = phases[i].end;
  return options.strategy == schedules::anneal_strategy::linear
             ? (end - start) * part + start
             : end + (start - end) / 2.0 * (std::cos(std::numbers::pi * part) + 1.0);
}

inline std::vector<double> reference_rates(const schedules::one_cycle_lr_options& options,
                                           std::uint64_t count) {
  std::vector<double> rates(count);
  for (std::uint64_t t = 0; t < count; ++t) {
    rates[t] = reference_rate(options, std::min(t, options.total_steps - 1));
  }
  return rates;
}

/// SequentialLR: at clock t the scheduler behind the last milestone that is <= t, which was set to
/// its own step 0 there.
inline std::vector<double> reference_sequence(const std::vector<std::vector<double>>& parts,
                                              const std::vector<std::uint64_t>& milestones,
                                              std::uint64_t count) {
  std::vector<double> rates(count);
  for (std::uint64_t t = 0; t < count; ++t) {
    const auto index = static_cast<std::size_t>(
        std::upper_bound(milestones.begin(), milestones.end(), t) - milestones.begin());
    rates[t] = parts[index][index == 0 ? t : t - milestones[index - 1]];
  }
  return rates;
}

}  // namespace stepgraph::test
