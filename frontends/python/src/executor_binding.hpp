#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "python_callback.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/executor.hpp"

namespace stepgraph::python {

/// Lets one thread at a time launch, update, read back or release an executor, and refuses a
/// callback that calls back into its own executor, which would wait for itself.
class one_at_a_time {
 public:
  class turn {
   public:
    /// Waits, so not to be called with the GIL held. Throws usage_error.
    explicit turn(one_at_a_time& of) : of_(of) {
      if (of_.owner_.load() == std::this_thread::get_id()) {
        throw usage_error("the executor was called from within its own foreign work");
      }
      of_.mutex_.lock();
      of_.owner_.store(std::this_thread::get_id());
    }
    ~turn() {
      of_.owner_.store(std::thread::id());
      of_.mutex_.unlock();
    }
    turn(const turn&) = delete;
    turn& operator=(const turn&) = delete;

   private:
    one_at_a_time& of_;
  };

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
};

/// What Python holds of an executor: the executor, and its callbacks for the garbage collector.
class executor_binding {
 public:
  virtual ~executor_binding() = default;
  executor_binding(const executor_binding&) = delete;
  executor_binding& operator=(const executor_binding&) = delete;

  /// Throws usage_error after a release that left nothing.
  virtual executor& core() = 0;
  /// Frees what the executor holds; waits for its launches.
  virtual void release() = 0;
  virtual const void* loss_scale_address() = 0;
  virtual const void* totals_address() = 0;

  /// Runs `call` without the GIL, one at a time.
  template <class Call>
  decltype(auto) exclusively(Call&& call) {
    const nanobind::gil_scoped_release gil;
    const one_at_a_time::turn turn(turns_);
    return std::forward<Call>(call)();
  }

  callback_list& callbacks() noexcept { return callbacks_; }

 protected:
  executor_binding() = default;
  explicit executor_binding(callback_list callbacks) : callbacks_(std::move(callbacks)) {}

 private:
  one_at_a_time turns_;
  callback_list callbacks_;
};

/// Type slots by which Python's collector sees the callbacks: an optimizer whose hook is foreign
/// work of its own executor would otherwise never be freed.
extern PyType_Slot executor_slots[];

}  // namespace stepgraph::python
