#pragma once

#include <memory>

#include "stepgraph/executor.hpp"

namespace stepgraph {

/// Runs a plan on the processor: all cores, vectorized, and bit for bit what the CUDA executors
/// compute. Needs no CUDA toolkit.
class host_executor final : public executor {
 public:
  /// Refuses a plan of shapes alone and a plan whose tensors are not in host memory.
  explicit host_executor(step_plan plan);
  ~host_executor() override;
  host_executor(host_executor&&) noexcept;
  host_executor& operator=(host_executor&&) noexcept;

  /// Runs one step; returns when it is done. Not to be called from two threads at once.
  void launch();

  /// Goes on with another plan: the next launch runs its step. Counters, samples and the loss scale
  /// go on; groups of the same name keep their progress and values set by hand, unless the new plan
  /// says otherwise of them than the plan before; other groups begin as the plan says. Tensors
  /// carry their own state. No path is dearer than `table_write` here. Refuses what the constructor
  /// refuses; then, and after any other error, everything is as it was.
  update_report update(step_plan next);

  step_status status() override;

  /// The loss scale that the next step expects in its gradients.
  const float* loss_scale_address() const noexcept;

 private:
  void check_memory(const void* data, const std::string& tensor,
                    operand_kind operand) const override;
  void check_inputs(const step_plan& plan) const override;
  device_location device() const override;

  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace stepgraph
