#pragma once

#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "step_runner.hpp"
#include "stepgraph/libtorch/adam.hpp"
#include "tensor_checks.hpp"

namespace stepgraph::libtorch::detail {

using param_groups = std::vector<torch::optim::OptimizerParamGroup>;
using param_states = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// The options of group number `index`. Throws usage_error if they are of another optimizer's type.
AdamOptions& options_of(torch::optim::OptimizerParamGroup& group, std::size_t index);

group_options to_core(const AdamOptions& options, std::string name, std::uint64_t step);
step_options to_core(const StepOptions& options);

bool same_schedule(const AdamOptions& a, const AdamOptions& b);
/// True if nothing differs but the hyperparameters that reach a running executor.
bool same_plan_options(const AdamOptions& a, const AdamOptions& b);

/// The state of a parameter, or null.
AdamParamState* find_state(const param_states& states, const at::Tensor& parameter);

/// What a checkpoint says beside the states and options.
struct step_counts {
  std::uint64_t step = 0;
  std::vector<std::uint64_t> groups;
};

/// Between torch's groups and states, which the user may change at will, and the executor, which
/// knows the memory and options it was built for. Holds what the executor was told, compares at
/// every step, and sends the difference.
class step_engine {
 public:
  explicit step_engine(StepOptions options)
      : options_(std::move(options)), capturable_(options_.capturable()) {}

  /// "group 0 parameter 3" or the user's name for it; `flat` counts through all groups.
  std::string name_of_parameter(std::size_t group, std::size_t index, std::size_t flat) const;

  void step(param_groups& groups, param_states& states);
  void prepare(param_groups& groups, param_states& states);
  void deliver(param_groups& groups);
  void abandon_captured_steps() noexcept;
  void resume_schedule(param_groups& groups, std::size_t group);
  void set_loss_scale(double value);
  void set_max_grad_norm(double value);

  /// Also refreshes the steps of the states.
  step_status status(const param_groups& groups, const param_states& states);
  /// Steps of the whole, and of each group in the order of `groups`.
  step_counts counts(const param_groups& groups, const param_states& states);
  /// Throws usage_error while capturing, and if a captured step cannot take on these options.
  void check_loadable(const param_groups& groups, const std::vector<AdamOptions>& options,
                      std::optional<double> max_grad_norm) const;
  /// After the states were loaded: the counts and which groups hold a learning rate by hand.
  void restore(param_groups& groups, const step_counts& counts,
               const std::vector<bool>& learning_rate_by_hand);
  std::vector<bool> learning_rates_by_hand(const param_groups& groups) const;

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
    bool learning_rate_by_hand = false;
    std::uint64_t step = 0;  ///< when last read back or loaded
  };

  bool measures_norm() const;
  /// Sends what changed. False if only a new plan can.
  bool revalidate(param_groups& groups, const param_states& states);
  bool send_options(group_id group, known_group& known, const AdamOptions& options);
  bool revalidate_memory(tensor_id id, bound_parameter& bound, const at::Tensor& parameter,
                         const at::Tensor& gradient);
  void rebind(tensor_id id, operand_kind operand, held_memory& held, held_memory now,
              const std::string& name);
  bool states_are_bound(const param_states& states) const;

  void build(param_groups& groups, param_states& states);
  std::optional<c10::Device> check_operands(const param_groups& groups) const;
  std::uint64_t step_of_group(param_groups& groups, std::size_t group, std::size_t first,
                              const param_states& states) const;
  known_group known_after_build(const AdamOptions& options, std::size_t parameters,
                                std::uint64_t step) const;
  const known_group* find_group(const AdamOptions& options) const;
  /// Reads the executor and stores the counts here and in the states.
  step_status refresh_counts(const param_states& states);

  StepOptions options_;
  // Destroyed last to first: the executor waits for its launches before the memory goes.
  std::vector<bound_parameter> parameters_;
  std::vector<known_group> groups_;
  std::unique_ptr<step_runner> runner_;
  std::optional<c10::Device> device_;

  std::uint64_t step_ = 0;                  ///< of the whole, when last read back or loaded
  std::uint64_t skipped_before_ = 0;        ///< by executors that have been replaced
  std::optional<step_counts> undelivered_;  ///< set, but not yet visible in the executor's status
  bool pending_ = false;                    ///< something was sent since the last delivery
  bool rebuild_ = false;
  bool capturable_ = false;  ///< by option, or since the first step happened inside a capture
  bool states_may_differ_ = false;
  std::uint64_t captures_ = 0;
  std::uint64_t rebinds_ = 0;
};

}  // namespace stepgraph::libtorch::detail
