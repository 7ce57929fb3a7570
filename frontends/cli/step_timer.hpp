#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

namespace stepgraph::cli {

/// Times the optimizer steps of a training, one measurement a step.
///
/// On a GPU: waits until torch's current stream is idle, so that only the step is measured, and
/// takes the time between an event before and an event after the call. The launch time is the time
/// until the call returned. Elsewhere: the time of the call.
class step_timer {
 public:
  explicit step_timer(bool on_gpu);
  ~step_timer();
  step_timer(const step_timer&) = delete;
  step_timer& operator=(const step_timer&) = delete;

  void start();
  /// Waits for the step; its time in microseconds.
  double stop();

  /// Medians in microseconds, of all steps but the first tenth, which still warms up.
  double median_step_us() const;
  std::optional<double> median_launch_us() const;

 private:
  struct events;

  std::unique_ptr<events> events_;
  std::chrono::steady_clock::time_point started_;
  std::vector<double> step_us_;
  std::vector<double> launch_us_;
};

}  // namespace stepgraph::cli
