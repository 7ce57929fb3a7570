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

  step_status status() override;

  /// The loss scale that the next step expects in its gradients.
  const float* loss_scale_address() const noexcept;

 private:
  void check_memory(const void* data, const std::string& tensor,
                    operand_kind operand) const override;

  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace stepgraph
