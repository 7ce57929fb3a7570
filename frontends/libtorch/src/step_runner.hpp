#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <memory>

#include "stepgraph/executor.hpp"

namespace stepgraph::libtorch::detail {

/// An executor with torch's conventions around its launches: current stream, current device.
class step_runner {
 public:
  virtual ~step_runner() = default;

  virtual executor& core() noexcept = 0;

  /// One f32 where the step runs: the loss scale that the next step expects.
  virtual const float* loss_scale_address() const = 0;

  /// Whether the current stream is being captured.
  virtual bool capturing() const { return false; }
  /// Throws usage_error if the current stream is being captured and a launch may not be recorded.
  virtual void check_launch() {}
  /// Throws usage_error, naming the caller, if the current stream is being captured at all.
  void check_not_capturing(const char* caller) const;

  /// Runs, enqueues or records one step. `pending`: values were set or operands re-bound since the
  /// last delivery. Returns true if they have been delivered with it.
  virtual bool launch(bool pending) = 0;

  /// Whether `deliver` does anything; otherwise only steps deliver.
  virtual bool can_deliver() const noexcept { return false; }
  /// Enqueues a delivery without a step.
  virtual void deliver() {}

  /// A step was recorded into a capture of the caller's, so addresses must not change.
  virtual bool captured() const noexcept { return false; }
  virtual void abandon_captures() noexcept {}

  /// Memory no longer bound: keeps it from being reused before the launches made so far end.
  virtual void retire(const c10::Storage&) {}
};

std::shared_ptr<step_runner> make_host_runner(step_plan plan);

#if defined(STEPGRAPH_LIBTORCH_CUDA)

/// `capturable`: kernels on the current stream; else a graph.
std::shared_ptr<step_runner> make_cuda_runner(step_plan plan, c10::Device device, bool capturable);

/// Whether torch's current stream of the device is being captured.
bool current_stream_is_capturing(c10::Device device);

/// While it lives, work that must not become part of the caller's capture can be done: allocations
/// are legal, and torch's current stream is one that is not being captured.
class outside_capture {
 public:
  explicit outside_capture(c10::Device device);
  ~outside_capture();
  outside_capture(const outside_capture&) = delete;
  outside_capture& operator=(const outside_capture&) = delete;

  /// Waits for the work done under it.
  void finish();

 private:
  struct state;
  std::unique_ptr<state> state_;
};

#endif

}  // namespace stepgraph::libtorch::detail
