#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stepgraph/kernels/signature.hpp"
#include "stepgraph/kernels/tensor_table.hpp"
#include "stepgraph/math/step_scalars.hpp"
#include "stepgraph/schedule.hpp"
#include "stepgraph/tensor_view.hpp"

namespace stepgraph {

/// Index of a group in `step_plan::groups`, in the order of `step_builder::add_group`.
using group_id = std::uint32_t;
/// Index of a tensor in `step_plan::tensors`, in the order of `step_builder::add_tensor`.
using tensor_id = std::uint32_t;

enum class weight_decay_mode : std::uint8_t {
  decoupled,  ///< AdamW: the parameter shrinks by learning rate * weight decay
  l2,         ///< Adam: weight decay * parameter joins the gradient
};

/// Hyperparameters of a parameter group. Every number can be changed later on a live executor.
struct group_options {
  std::string name = {};        ///< for messages; "group <index>" if empty
  double learning_rate = 1e-3;  ///< where there is no schedule
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  ///< likewise
  weight_decay_mode mode = weight_decay_mode::decoupled;
  bool bias_correction = true;
  bool maximize = false;
  std::optional<schedule> learning_rate_schedule = {};  ///< evaluated on the device, once a step
  std::optional<schedule> weight_decay_schedule = {};   ///< likewise
  std::uint64_t step = 0;  ///< updates already applied, when training resumes
  /// Gradients of one norm group have a norm of their own beside the global one, which combines all
  /// of them and decides on clipping and skipping. Groups without a name share one.
  std::string norm_group = {};
  /// One f32 in the memory of the tensors that every step reads, instead of value and schedule:
  /// whoever writes it orders that with the launches. Null: none.
  const float* learning_rate_input = nullptr;
  const float* weight_decay_input = nullptr;  ///< likewise
};

/// The operands of one tensor's update. All have the parameter's element count and device.
struct tensor_operands {
  std::string name;  ///< the user's name for it; every message about the tensor carries it
  tensor_view parameter = {};
  /// Required; optional so that its absence can be reported.
  std::optional<tensor_view> gradient = {};
  /// What the update works on, where there is one; the parameter is then its rounded copy. f32, f16
  /// (block-scaled), or the remainder that completes a bf16 parameter.
  std::optional<tensor_view> master = {};
  tensor_view exp_avg = {};     ///< first moment
  tensor_view exp_avg_sq = {};  ///< second moment
  /// Largest second moment so far (AMSGrad), in the format of exp_avg_sq.
  std::optional<tensor_view> max_exp_avg_sq = {};
  /// Required for an e4m3 or e5m2 parameter: three f32 on the same device.
  std::optional<fp8_scaling> parameter_scaling = {};
};

/// Options of the step as a whole.
///
/// A skipped step leaves parameters, state and the groups' steps as they are; only the loss scale
/// and its counters move.
struct step_options {
  bool skip_non_finite = false;  ///< skip the step when a gradient is not finite
  double max_grad_norm = 0.0;    ///< clip the global norm of the gradient; 0: no clipping.
                                 ///< Implies skip_non_finite: an infinite norm cannot be clipped
  double skip_above_norm = 0.0;  ///< skip the step when the norm is above this; 0: never
  norm_kind norm = norm_kind::l2;
  bool measure_norm = false;       ///< measure it even if nothing depends on it
  bool count_zeros = false;        ///< count the gradient elements that are zero
  double loss_scale = 1.0;         ///< gradients arrive multiplied by this, rounded to f32
  loss_scaling scaling = {};       ///< how the scale changes; a rule implies skip_non_finite
  bool zero_gradients = false;     ///< the update stores zeros into the gradients it has read
  bool unscale_gradients = false;  ///< gradients are left divided by the scale and clipped
  /// One f32 each in the memory of the tensors that every step reads; null: none.
  const float* found_inf_input = nullptr;   ///< anything but zero, NaN too, skips the step
  const float* loss_scale_input = nullptr;  ///< instead of loss_scale; needs the rule `fixed`
  /// Leave the totals of the gradient to foreign work, which combines them over devices, between
  /// `grad_stats` and a node `advance_step` of its own.
  bool exchange_totals = false;
  std::uint64_t samples_per_step = 0;  ///< what an applied step adds to the samples consumed
  std::uint32_t record_capacity = 0;   ///< step records that the ring holds; 0: none are written
  /// Round bf16 parameters without master up or down at random, in proportion to the distance, so
  /// that updates smaller than their last place survive on average. Keyed by seed, step, tensor and
  /// element: replays differ, reruns repeat.
  bool stochastic_rounding = false;
  std::uint64_t seed = 0;  ///< of the stochastic rounding
};

/// True if a step with these options reads its gradients before it updates.
bool measures_gradients(const step_options& options);
/// True if a gradient that is not finite skips the step.
bool skips_non_finite(const step_options& options);

enum class node_kind : std::uint8_t {
  grad_stats,       ///< reads every gradient; one of its blocks advances the step
  advance_step,     ///< advances the step when grad_stats does not
  update,           ///< Adam for all tensors of one signature
  scale_gradients,  ///< unscales and clips gradients that have no parameter
  foreign,          ///< work of the caller's, known to the executor by the node's name
};

/// A tensor of the plan.
struct plan_tensor {
  tensor_operands operands;
  group_id group = 0;
  update_signature signature;
  bool gradient_only = false;  ///< takes part in the norm and in unscaling, not in an update
};

/// One kernel launch of the step, or one loop of the host executor, or one call of foreign work.
struct plan_node {
  std::string
      name;  ///< that of its kind, of an update "update/<signature>", of foreign work its own
  node_kind kind = node_kind::update;
  update_signature signature;       ///< of an update
  std::vector<tensor_id> tensors;   ///< whose operands it touches, in launch order
  std::uint64_t chunks = 0;         ///< of those tensors
  std::uint32_t blocks = 0;         ///< thread blocks of the launch; 0: nothing is launched
  std::uint32_t threads = 0;        ///< threads of a block
  std::uint64_t bytes_read = 0;     ///< from tensors
  std::uint64_t bytes_written = 0;  ///< to tensors
  bool only_if_applied = false;     ///< foreign work that a skipped step leaves out
  bool writes_record = false;       ///< one block of its launch writes the step's record
};

/// `to` starts when `from` has finished.
struct plan_edge {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  /// `to` may start its prologue earlier (programmatic launch). Never of foreign work, which need
  /// not wait for anything by itself.
  bool programmatic = true;
};

/// A whole step as plain data: what runs, in which order, on which memory. Built by `step_builder`,
/// run by an executor. Owns its strings and numbers; borrows the memory of the tensors.
struct step_plan {
  device_location device;
  step_options options;
  std::vector<group_options> groups;
  std::vector<std::string> norm_groups;      ///< names, in the order of their groups; at least one
  std::vector<std::uint32_t> norm_group_of;  ///< of each group
  std::vector<plan_tensor> tensors;
  std::vector<plan_node> nodes;  ///< in an order in which they can run
  std::vector<plan_edge> edges;
  bool shapes_only = false;  ///< built without memory: can be inspected, not run

  std::uint64_t parameter_count() const;
  std::uint64_t bytes_read() const;
  std::uint64_t bytes_written() const;
  /// Index of the node that advances the step: what comes after it knows whether the step is
  /// skipped.
  std::size_t advance_node() const;
};

/// The plan as a Graphviz digraph: nodes with launch sizes and bytes, edges with their kind.
std::string to_dot(const step_plan& plan);

}  // namespace stepgraph
