#pragma once

#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core_options.hpp"
#include "step_runner.hpp"
#include "stepgraph/libtorch/adam.hpp"
#include "tensor_checks.hpp"

namespace stepgraph::libtorch::detail {

/// Values that were assigned by hand and hold over the schedules of a group.
struct held_by_hand {
  bool learning_rate = false;
  bool weight_decay = false;
};

/// Between torch's groups and states, which the user may change at will, and the executor, which
/// knows the memory and options it was built for. Holds what the executor was told, compares at
/// every step, and sends the difference.
class step_engine {
 public:
  explicit step_engine(StepOptions options);
  /// Waits for the launches made so far.
  ~step_engine();
  step_engine(const step_engine&) = delete;
  step_engine& operator=(const step_engine&) = delete;

  /// "group 0 parameter 3" or the user's name for it; `flat` counts through all groups.
  std::string name_of_parameter(std::size_t group, std::size_t index, std::size_t flat) const;

  void step(param_groups& groups, param_states& states);
  void prepare(param_groups& groups, param_states& states);
  void deliver(param_groups& groups);
  void abandon_captured_steps() noexcept;
  void resume_schedule(param_groups& groups, std::size_t group);
  void resume_weight_decay_schedule(param_groups& groups, std::size_t group);
  void set_loss_scale(double value);
  void set_max_grad_norm(double value);
  void set_skip_above_norm(double value);
  void set_samples_per_step(std::uint64_t samples);

  at::Tensor loss_scale_tensor(const param_groups& groups);
  record_batch records();

  /// Also refreshes the steps of the states. Groups are those of the built step.
  step_status status(const param_groups& groups, const param_states& states);
  /// Where the step stands, with groups in the order of `groups`: what a checkpoint holds.
  step_status progress(const param_groups& groups, const param_states& states, const char* caller);
  /// Throws usage_error while capturing, and if a captured step cannot take on these options.
  void check_loadable(const param_groups& groups, const std::vector<AdamOptions>& options,
                      bool needs_norm) const;
  /// After the states were loaded: where the step stands and what is held by hand.
  void restore(param_groups& groups, const step_status& progress,
               const std::vector<held_by_hand>& held);
  std::vector<held_by_hand> held(const param_groups& groups) const;

  const StepOptions& options() const noexcept { return options_; }
  const step_plan& plan() const;
  bool captured() const noexcept { return runner_ && runner_->captured(); }
  std::uint64_t captures() const noexcept { return captures_; }
  std::uint64_t rebinds() const noexcept { return rebinds_; }
  void expect_changed_states() noexcept { states_may_differ_ = true; }

 private:
  struct bound_parameter {
    std::string name;
    held_memory parameter;
    held_memory gradient;
    std::array<held_memory, 3> state;  ///< exp_avg, exp_avg_sq, master
  };

  /// A group as last seen. Its options object identifies it: torch moves groups, not options.
  struct known_group {
    const AdamOptions* identity = nullptr;
    AdamOptions sent;  ///< what the executor works with
    std::size_t parameters = 0;
    held_by_hand held;
    held_memory lr_tensor;
    std::uint64_t step = 0;  ///< when last read back or loaded
  };

  bool measures_norm() const;
  /// Builds the step anew, now or at the next step, for a norm that it does not measure yet.
  void set_norm_option(double value, void (executor::*set)(double));
  /// Sends what changed. False if only a new plan can.
  bool revalidate(param_groups& groups, const param_states& states);
  bool inputs_are_bound() const;
  bool send_options(group_id group, known_group& known, const AdamOptions& options);
  bool revalidate_memory(tensor_id id, bound_parameter& bound, const at::Tensor& parameter,
                         const at::Tensor& gradient);
  void rebind(tensor_id id, operand_kind operand, held_memory& held, held_memory now,
              const std::string& name);
  bool states_are_bound(const param_states& states) const;

  void build(param_groups& groups, param_states& states);
  std::optional<c10::Device> check_operands(const param_groups& groups) const;
  void check_inputs(const param_groups& groups, const std::optional<c10::Device>& device) const;
  std::uint64_t step_of_group(param_groups& groups, std::size_t group, std::size_t first,
                              const param_states& states) const;
  known_group known_after_build(const AdamOptions& options, std::size_t parameters,
                                std::uint64_t step) const;
  /// What the next step will see as held, given what was sent.
  static held_by_hand held_next(const known_group& known, const AdamOptions& options);
  /// Tells a new executor what the old one, or a checkpoint, left. True if there was anything.
  bool send_progress(executor& core, const std::vector<known_group>& groups,
                     const step_status& progress) const;
  known_group* find_group(const AdamOptions& options);
  const known_group* find_group(const AdamOptions& options) const;
  /// Null for a group that no step has seen, whose schedule runs anyway.
  known_group* group_to_resume(param_groups& groups, std::size_t group,
                               const std::optional<schedule>& (AdamOptions::*of)() const);
  /// Reads the executor and stores the counts here and in the states.
  const step_status& refresh(const param_states& states);
  loss_scale_state first_loss_scale() const;
  bool is_first_state() const;
  void delivered();
  /// Keeps the records of the executor for `records`.
  void drain_records();
  /// Ends the executor; a loss-scale tensor that somebody kept keeps its memory.
  void drop_runner() noexcept;

  StepOptions options_;
  // Destroyed last to first: the executor waits for its launches before the memory goes.
  std::vector<bound_parameter> parameters_;
  std::vector<known_group> groups_;
  held_memory found_inf_;
  held_memory loss_scale_input_;
  std::shared_ptr<step_runner> runner_;
  at::Tensor loss_scale_tensor_;  ///< over the executor's memory; keeps the runner
  std::optional<c10::Device> device_;

  /// When last read back or loaded. Its groups are those of the executor.
  step_status progress_;
  /// Set, but not yet visible in the executor's status.
  std::optional<step_status> undelivered_;
  std::optional<float> undelivered_loss_scale_;  ///< likewise, the scale alone
  std::vector<step_record> kept_records_;        ///< of executors that have been replaced
  std::uint64_t overwritten_records_ = 0;        ///< likewise
  std::uint64_t last_launch_ = 0;                ///< of the latest record read
  std::uint64_t launches_before_ = 0;            ///< of executors that have been replaced
  bool pending_ = false;                         ///< something was sent since the last delivery
  bool rebuild_ = false;
  bool capturable_ = false;  ///< by option, or since the first step happened inside a capture
  bool states_may_differ_ = false;
  std::uint64_t captures_ = 0;
  std::uint64_t rebinds_ = 0;
};

}  // namespace stepgraph::libtorch::detail
