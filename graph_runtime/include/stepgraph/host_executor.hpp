#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "stepgraph/executor.hpp"

namespace stepgraph {

/// What a plan's foreign work is on the host, by the names of its nodes. Called by every launch, in
/// the thread of the launch, after the nodes before it have finished.
using host_foreign_work = std::map<std::string, std::function<void()>>;

/// Runs a plan on the processor: all cores, vectorized, and bit for bit what the CUDA executors
/// compute. Needs no CUDA toolkit.
class host_executor final : public executor {
 public:
  /// Refuses a plan of shapes alone, a plan whose tensors are not in host memory, and callbacks
  /// that are not those of the plan's foreign work, naming the first. Keeps copies of the
  /// callbacks.
  explicit host_executor(step_plan plan, host_foreign_work foreign = {});
  ~host_executor() override;
  host_executor(host_executor&&) noexcept;
  host_executor& operator=(host_executor&&) noexcept;

  /// Runs one step; returns when it is done. Not to be called from two threads at once. What
  /// foreign work throws passes on: the nodes before it have run, those after it have not, and
  /// values set by hand stay pending unless the node that advances the step has run.
  void launch();

  /// Goes on with another plan: the next launch runs its step. Counters, samples and the loss scale
  /// go on; groups of the same name keep their progress and values set by hand, unless the new plan
  /// says otherwise of them than the plan before; other groups begin as the plan says. Tensors
  /// carry their own state. No path is dearer than `table_write` here. Refuses what the constructor
  /// refuses; then, and after any other error, everything is as it was.
  /// Foreign work goes on with the callbacks of before or, where they are given, with `foreign`.
  update_report update(step_plan next, std::optional<host_foreign_work> foreign = {});

  step_status status() override;

  /// The loss scale that the next step expects in its gradients.
  const float* loss_scale_address() const noexcept;

  /// One f64 for each norm group and one for the zeros: what foreign work after the node
  /// `grad_stats` of a plan with exchange_totals combines with those of others.
  double* totals_address() noexcept;

 private:
  void check_memory(const void* data, const std::string& tensor,
                    operand_kind operand) const override;
  void check_inputs(const step_plan& plan) const override;
  device_location device() const override;

  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace stepgraph
