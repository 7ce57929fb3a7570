#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "stepgraph/step_plan.hpp"
#include "stepgraph/step_record.hpp"

namespace stepgraph {

namespace detail {
struct step_tables;
class pending_changes;
class record_ring;
}  // namespace detail

/// Where one group stands.
struct group_status {
  std::uint64_t step = 0;      ///< updates applied
  double learning_rate = 0.0;  ///< of the latest applied update
  double weight_decay = 0.0;   ///< of the latest applied update
};

/// Where the step stands, read back from the memory of the executor.
struct step_status {
  std::uint64_t step = 0;     ///< steps applied
  std::uint64_t skipped = 0;  ///< steps skipped
  std::uint64_t samples = 0;  ///< consumed by the applied steps
  bool last_skipped = false;  ///< the latest step was skipped
  bool found_inf = false;  ///< in the latest step: a gradient was not finite, or the input said so
  double grad_norm = 0.0;  ///< of the latest step: global norm of the unscaled gradient before
                           ///< clipping; 0 if the plan does not measure it, infinity if not finite
  std::vector<double> norms;  ///< of each norm group, likewise
  std::uint64_t zeros = 0;    ///< gradient elements that are zero, if the plan counts them
  double clip_coefficient = 1.0;
  double loss_scale = 1.0;           ///< of the latest step
  loss_scale_state next_loss_scale;  ///< of the next step
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
/// Hand-set values and schedules: a learning rate or weight decay set by hand holds from the next
/// launch on, over any schedule, until the schedule is resumed; the schedule's clock (the group's
/// step or the samples) keeps running meanwhile, so that it resumes where it would have been.
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
  /// Gives the weight decay back to the group's schedule; refused if it has none.
  void resume_weight_decay_schedule(group_id group);
  void set_betas(group_id group, double beta1, double beta2);
  void set_eps(group_id group, double value);
  /// The number of updates the group has applied: to resume from a checkpoint.
  void set_group_step(group_id group, std::uint64_t step);
  /// The number of steps applied, of all groups and the whole step.
  void set_step(std::uint64_t step);
  /// The scale of the next step, rounded to f32; its counters stay.
  void set_loss_scale(double value);
  /// 0: no clipping. Refused unless the plan measures the gradients (`measures_gradients`).
  void set_max_grad_norm(double value);
  /// 0: no step is skipped for its norm. Refused unless the plan measures the gradients.
  void set_skip_above_norm(double value);
  /// What each applied step adds to the samples consumed.
  void set_samples_per_step(std::uint64_t samples);
  /// Restores where a step stood: counters, samples, loss scale and the steps of all groups. The
  /// tensors are the caller's to restore, in place; nothing needs to be captured again. Refuses a
  /// state of another number of groups.
  void load_state(const step_status& state);

  /// Points one operand of one tensor at other memory of the same element count, format and device,
  /// from the next launch on. The old memory must stay valid until the launches already made have
  /// finished. A block-scaled operand moves together with its scales, for others `scales` is null.
  /// Refuses null and misaligned memory and memory of another device, naming the tensor.
  void rebind(tensor_id tensor, operand_kind operand, void* data, std::uint8_t* scales = nullptr);

  /// Reads where the step stands, after all launches made so far; waits for them. Values set since
  /// the last launch are not visible yet.
  virtual step_status status() = 0;

  /// Takes the records of the steps that have finished since the last call, oldest first, without
  /// waiting for anything: a record is complete or it is not there yet. Records that the ring had
  /// to overwrite are counted. Empty if the plan writes none (record_capacity). Not to be called
  /// from two threads at once; legal after a release.
  record_batch read_records();

 protected:
  explicit executor(step_plan plan);

  /// Throws usage_error if `data` cannot be an operand of this executor.
  virtual void check_memory(const void* data, const std::string& tensor,
                            operand_kind operand) const = 0;

  detail::step_tables& tables() noexcept { return *tables_; }
  detail::pending_changes& pending() noexcept { return *pending_; }
  /// Where the plan's records go, if it writes any; called once by the constructor.
  void set_records(std::unique_ptr<detail::record_ring> records);

 private:
  void check_group(group_id group) const;
  void check_measures(const char* option) const;

  std::unique_ptr<const step_plan> plan_;
  std::unique_ptr<detail::step_tables> tables_;
  std::unique_ptr<detail::pending_changes> pending_;
  std::unique_ptr<detail::record_ring> records_;
};

}  // namespace stepgraph
