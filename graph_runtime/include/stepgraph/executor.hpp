#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "stepgraph/step_plan.hpp"

namespace stepgraph {

namespace detail {
struct step_tables;
class pending_changes;
}  // namespace detail

/// Where one group stands.
struct group_status {
  std::uint64_t step = 0;      ///< updates applied
  double learning_rate = 0.0;  ///< of the latest applied update
};

/// Where the step stands, read back from the memory of the executor.
struct step_status {
  std::uint64_t step = 0;     ///< steps applied
  std::uint64_t skipped = 0;  ///< steps skipped
  bool last_skipped = false;  ///< the latest step was skipped
  double grad_norm = 0.0;  ///< of the latest step: global L2 norm of the unscaled gradient before
                           ///< clipping; 0 if the plan does not measure it, infinity if not finite
  double loss_scale = 1.0;
  double clip_coefficient = 1.0;
  std::vector<group_status> groups;
};

/// Which memory of a tensor a binding names.
enum class operand_kind : std::uint8_t {
  parameter,
  gradient,
  master,
  exp_avg,
  exp_avg_sq,
  max_exp_avg_sq,
};

/// "parameter", "gradient", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq".
const char* name_of(operand_kind kind);

/// What the three executors share: a plan, and the values that can be changed while it runs.
///
/// Setters take effect at the next launch, in the order of launches: a launch that was made before
/// the call, running or not, keeps the old value. They do not block, allocate device memory,
/// synchronise or touch a stream, and may be called from any thread between two launches. Each
/// throws usage_error for a group that does not exist or a value that `step_builder` would refuse,
/// and then changes nothing.
///
/// Hand-set values and schedules: a learning rate set by hand holds from the next launch on, over
/// any schedule, until `resume_schedule`; the schedule's clock is the group's step and keeps
/// running meanwhile, so that the schedule resumes where it would have been.
class executor {
 public:
  virtual ~executor();
  executor(executor&&) noexcept;
  executor& operator=(executor&&) noexcept;

  const step_plan& plan() const noexcept;

  void set_learning_rate(group_id group, double value);
  /// Gives the learning rate back to the group's schedule; refused if it has none.
  void resume_schedule(group_id group);
  void set_weight_decay(group_id group, double value);
  void set_betas(group_id group, double beta1, double beta2);
  void set_eps(group_id group, double value);
  /// The number of updates the group has applied: to resume from a checkpoint.
  void set_group_step(group_id group, std::uint64_t step);
  /// The number of steps applied, of all groups and the whole step.
  void set_step(std::uint64_t step);
  void set_loss_scale(double value);
  /// Has an effect only if the plan measures the norm (skip_non_finite or max_grad_norm > 0 when it
  /// was built); otherwise refused.
  void set_max_grad_norm(double value);

  /// Points one operand of one tensor at other memory of the same element count, format and device,
  /// from the next launch on. The old memory must stay valid until the launches already made have
  /// finished. A block-scaled operand moves together with its scales, for others `scales` is null.
  /// Refuses null and misaligned memory and memory of another device, naming the tensor.
  void rebind(tensor_id tensor, operand_kind operand, void* data, std::uint8_t* scales = nullptr);

  /// Reads where the step stands, after all launches made so far; waits for them. Values set since
  /// the last launch are not visible yet.
  virtual step_status status() = 0;

 protected:
  explicit executor(step_plan plan);

  /// Throws usage_error if `data` cannot be an operand of this executor.
  virtual void check_memory(const void* data, const std::string& tensor,
                            operand_kind operand) const = 0;

  detail::step_tables& tables() noexcept { return *tables_; }
  detail::pending_changes& pending() noexcept { return *pending_; }

 private:
  void check_group(group_id group) const;
  bool measures_norm() const;

  std::unique_ptr<const step_plan> plan_;
  std::unique_ptr<detail::step_tables> tables_;
  std::unique_ptr<detail::pending_changes> pending_;
};

}  // namespace stepgraph
