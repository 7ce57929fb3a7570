#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stepgraph/address_ledger.hpp"
#include "stepgraph/operand_kind.hpp"
#include "stepgraph/step_plan.hpp"
#include "stepgraph/step_record.hpp"
#include "stepgraph/update_report.hpp"

namespace stepgraph {

namespace detail {
struct step_tables;
struct plan_update;
struct step_block_image;
class pending_changes;
class record_reader;
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

/// Other memory for one operand of one tensor.
struct binding {
  tensor_id tensor = 0;
  operand_kind operand = operand_kind::parameter;
  void* data = nullptr;
  std::uint8_t* scales = nullptr;  ///< of a block-scaled operand
  /// The caller knows that the memory is of the executor's device, for example from the framework
  /// that it belongs to: the driver is not asked, which costs up to a microsecond each.
  bool of_the_device = false;
};

/// What the three executors share: a plan, and the values that can be changed while it runs.
///
/// Setters take effect at the next launch, in the order of launches: a launch that was made before
/// the call, running or not, keeps the old value. They do not block, allocate device memory,
/// synchronise or touch a stream, and may be called from any thread, also while another launches or
/// updates: each call takes effect wholly before or wholly after that. Each throws usage_error for
/// a group that does not exist or a value that `step_builder` would refuse, and then changes
/// nothing.
///
/// Launches, updates, `status` and `release` are for one thread at a time.
///
/// Hand-set values and schedules: a learning rate or weight decay set by hand holds from the next
/// launch on, over any schedule, until the schedule is resumed; the schedule's clock (the group's
/// step or the samples) keeps running meanwhile, so that it resumes where it would have been.
class executor {
 public:
  virtual ~executor();
  executor(executor&&) noexcept;
  executor& operator=(executor&&) noexcept;

  /// The plan it was built with or last updated to; the reference holds until the next update.
  /// Addresses are those of that moment: the ledger has the current ones.
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
  /// Refuses null and misaligned memory, memory of another device (unless a binding says that it is
  /// `of_the_device`), and an operand that the ledger knows to be resized, naming the tensor.
  void rebind(tensor_id tensor, operand_kind operand, void* data, std::uint8_t* scales = nullptr);
  /// Several at once: all of them, or none if one is refused.
  void rebind(std::span<const binding> bindings);

  /// Where the operands are. The reference holds as long as the executor, through updates and moves
  /// of the executor object; its tensors are those of the current plan.
  address_ledger& ledger() noexcept { return *ledger_; }
  const address_ledger& ledger() const noexcept { return *ledger_; }

  /// Why replays cannot be made right by re-binding alone, or nothing: an operand was freed or
  /// resized, the executor was released, an update was refused so that the step is older than its
  /// plan should be, or launches were captured that an update has invalidated. From any thread.
  std::optional<std::string> recapture_required() const;

  /// Reads where the step stands, after all launches made so far; waits for them. Values set since
  /// the last launch are not visible yet.
  virtual step_status status() = 0;

  /// Takes the records of the steps that have finished since the last call, oldest first, without
  /// waiting for anything: a record is complete or it is not there yet. Records that the ring had
  /// to overwrite are counted. Empty if the plan writes none (record_capacity). Legal from any
  /// thread and after a release; records of before an update have the groups of their time.
  record_batch read_records();

 protected:
  explicit executor(step_plan plan);

  /// Throws usage_error if `data` cannot be an operand of this executor.
  virtual void check_memory(const void* data, const std::string& tensor,
                            operand_kind operand) const = 0;
  /// Likewise for the inputs that the plan's options and groups name.
  virtual void check_inputs(const step_plan& plan) const = 0;
  /// Where its tensors must be.
  virtual device_location device() const = 0;

  detail::step_tables& tables() noexcept { return *tables_; }
  detail::pending_changes& pending() noexcept { return *pending_; }
  /// Where the plan's records go, if it writes any; called once by the constructor.
  void set_records(std::unique_ptr<detail::record_ring> records);

  /// Throws usage_error, naming the operand, if the ledger knows of a stale one. One load.
  void check_ledger() const {
    if (ledger_->stale() != 0) throw_if_stale();
  }

  /// Checks another plan and finds out what it takes to get there; allocates all that the commits
  /// need. Changes nothing. Throws usage_error.
  std::unique_ptr<detail::plan_update> prepare_update(step_plan next);
  /// Throws update_error, and remembers that an update was refused, if more than the ceiling is
  /// needed.
  void check_ceiling(const detail::plan_update& update, update_path ceiling);
  /// Remembers that the step is older than its plan should be, until an update succeeds.
  void note_refusal(const std::string& reason);

  /// The new plan's values and addresses become pending, for an update that needs no more than
  /// `table_write`. Returns its report.
  update_report commit_in_place(detail::plan_update& update) noexcept;
  /// The new plan takes the place of the old one, and `swap` puts the step that was built for it in
  /// the place of the old one; the old plan, tables and records stay in the arguments. `records`
  /// null: the ring stays. What was captured before must not be replayed. Setters wait meanwhile;
  /// `swap` must not throw.
  update_report commit_rebuilt(detail::plan_update& update,
                               std::unique_ptr<detail::record_ring>* records,
                               const std::function<void()>& swap) noexcept;

  /// Keeps the records that are complete for `read_records`, before their ring goes.
  void drain_records();

  /// A launch was captured by the caller and may be replayed.
  void note_capture();
  /// Everything after it is refused; `release` is called where no setter looks at the executor.
  void close(const std::function<void()>& release);

 private:
  void check_group(group_id group) const;
  void check_measures(const char* option) const;
  void check_binding(const binding& binding) const;
  void throw_if_stale() const;

  std::unique_ptr<step_plan> plan_;
  std::unique_ptr<detail::step_tables> tables_;
  std::unique_ptr<detail::pending_changes> pending_;
  std::unique_ptr<detail::record_reader> records_;
  std::unique_ptr<address_ledger> ledger_;
  std::string refused_update_;     ///< why the latest update was, if it was
  bool captured_ = false;          ///< a launch of this step may be replayed
  bool captures_invalid_ = false;  ///< launches of a step that is gone were captured, none since
};

}  // namespace stepgraph
