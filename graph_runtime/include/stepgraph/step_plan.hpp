#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stepgraph/kernels/signature.hpp"
#include "stepgraph/kernels/tensor_table.hpp"
#include "stepgraph/math/schedule.hpp"
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
  double learning_rate = 1e-3;  ///< used when there is no schedule
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  weight_decay_mode mode = weight_decay_mode::decoupled;
  bool bias_correction = true;
  bool maximize = false;
  std::optional<learning_rate_schedule> schedule = {};  ///< evaluated on the device, once a step
  std::uint64_t step = 0;  ///< updates already applied, when training resumes
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
struct step_options {
  bool skip_non_finite = false;  ///< leave everything untouched when a gradient is not finite
  double max_grad_norm = 0.0;    ///< clip the global L2 norm of the gradient; 0: no clipping.
                                 ///< Implies skip_non_finite: an infinite norm cannot be clipped
  double loss_scale = 1.0;       ///< gradients arrive multiplied by this
  bool zero_gradients = false;   ///< the update stores zeros into the gradients it has read
  /// Round bf16 parameters without master up or down at random, in proportion to the distance, so
  /// that updates smaller than their last place survive on average. Keyed by seed, step, tensor and
  /// element: replays differ, reruns repeat.
  bool stochastic_rounding = false;
  std::uint64_t seed = 0;  ///< of the stochastic rounding
};

enum class node_kind : std::uint8_t {
  grad_stats,    ///< reads every gradient; its last block advances the step
  advance_step,  ///< advances the step when there is no grad_stats
  update,        ///< Adam for all tensors of one signature
};

/// A tensor of the plan.
struct plan_tensor {
  tensor_operands operands;
  group_id group = 0;
  update_signature signature;
};

/// One kernel launch of the step, or one loop of the host executor.
struct plan_node {
  std::string name;  ///< "grad_stats", "advance_step", "update/<signature>"
  node_kind kind = node_kind::update;
  update_signature signature;       ///< of an update
  std::vector<tensor_id> tensors;   ///< whose operands it touches, in launch order
  std::uint64_t chunks = 0;         ///< of those tensors
  std::uint32_t blocks = 0;         ///< thread blocks of the launch; 0: nothing is launched
  std::uint32_t threads = 0;        ///< threads of a block
  std::uint64_t bytes_read = 0;     ///< from tensors
  std::uint64_t bytes_written = 0;  ///< to tensors
};

/// `to` starts when `from` has finished.
struct plan_edge {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  bool programmatic = true;  ///< `to` may start its prologue earlier (programmatic launch)
};

/// A whole step as plain data: what runs, in which order, on which memory. Built by `step_builder`,
/// run by an executor. Owns its strings and numbers; borrows the memory of the tensors.
struct step_plan {
  device_location device;
  step_options options;
  std::vector<group_options> groups;
  std::vector<plan_tensor> tensors;
  std::vector<plan_node> nodes;  ///< in an order in which they can run
  std::vector<plan_edge> edges;
  bool shapes_only = false;  ///< built without memory: can be inspected, not run

  std::uint64_t parameter_count() const;
  std::uint64_t bytes_read() const;
  std::uint64_t bytes_written() const;
};

/// The plan as a Graphviz digraph: nodes with launch sizes and bytes, edges with their kind.
std::string to_dot(const step_plan& plan);

}  // namespace stepgraph
