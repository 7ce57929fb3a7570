#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

/// How every program of this directory measures: warm-up, medians, batches.
namespace stepgraph::perf {

/// Runs before the first one that counts: clocks, caches and lazily loaded kernels settle.
inline constexpr int warmup_runs = 5;

/// Launches between two waits for the device. Far fewer than the driver queues (about a thousand),
/// so that no launch waits for room and its processor time is its own.
inline constexpr int launches_in_flight = 32;

/// Runs shorter than this are measured many at a time, back to back, so that the events' own time
/// does not count.
inline constexpr double shortest_measurement_seconds = 2e-3;

/// Runs that together last long enough to be measured.
inline int runs_worth_measuring(double seconds_per_run, int most) {
  const double runs = shortest_measurement_seconds / std::max(seconds_per_run, 1e-9);
  return std::clamp(static_cast<int>(std::min(runs, static_cast<double>(most))), 1, most);
}

/// The middle value; `values` must not be empty.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Seconds of wall time that a call takes on this thread.
template <class Call>
double wall_seconds(Call&& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace stepgraph::perf
