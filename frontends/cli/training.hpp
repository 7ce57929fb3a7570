#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stepgraph/math/loss_scale.hpp"
#include "stepgraph/schedule.hpp"

namespace stepgraph::cli {

enum class device_choice { automatic, cpu, cuda };

/// Type of parameters, gradients and activations. What is not f32 has f32 masters.
enum class parameter_type { f32, bf16, f16 };

/// What `stepgraph train` was asked for; checked by the caller.
struct training_settings {
  std::string text;
  std::int64_t steps = 0;
  std::int64_t batch = 0;
  std::int64_t context = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t width = 0;
  parameter_type type = parameter_type::f32;
  schedule learning_rate;
  double weight_decay = 0.0;  ///< of matrices; biases and norms do not decay
  std::optional<schedule> weight_decay_schedule;
  double beta1 = 0.0;
  double beta2 = 0.0;
  double eps = 0.0;
  double max_grad_norm = 0.0;    ///< 0: no clipping
  double skip_above_norm = 0.0;  ///< 0: no step is skipped for its norm
  double loss_scale = 1.0;       ///< of the first step
  loss_scaling scaling;
  std::uint64_t seed = 0;
  device_choice device = device_choice::automatic;
  bool compare = false;         ///< train once more with torch::optim::AdamW
  std::string save_path;        ///< of checkpoints; empty: none are written
  std::int64_t save_every = 0;  ///< steps between two of them; 0: only at the end
  std::string resume_path;      ///< of the checkpoint to go on from; empty: from the beginning

  bool scales_loss() const { return scaling.rule != loss_scale_rule::fixed || loss_scale != 1.0; }
};

/// One training from its first step to the last. The lists have an entry a step.
struct training_record {
  std::vector<double> losses;          ///< before each step's update
  std::vector<double> learning_rates;  ///< of the latest applied update
  std::vector<double> weight_decays;   ///< likewise, of the matrices
  std::vector<double> grad_norms;      ///< 0 where the norm is not measured, infinite on overflow
  std::vector<double> loss_scales;
  std::vector<std::int64_t> skipped_steps;  ///< the first step is 1
  double final_loss_scale = 1.0;            ///< of the step that would come next
  std::string parameters_digest;            ///< of the bits of the parameters at the end
  std::string state_digest;                 ///< of masters and moments; empty for the reference
  /// Median time of clipping, update and zeroing of the gradients. On a GPU between two events on
  /// an otherwise idle stream; elsewhere by the clock.
  double optimizer_step_us = 0.0;
  /// Median time until the call of the optimizer returned; only on a GPU.
  std::optional<double> launch_us;
};

struct training_result {
  std::string backend;          ///< "graph" or "host": the executor that ran the step
  std::string device;           ///< name of the GPU, or "cpu"
  std::int64_t first_step = 1;  ///< of the steps made here: later than 1 after a resume
  std::int64_t vocabulary = 0;
  std::int64_t characters = 0;
  std::int64_t tensors = 0;
  std::int64_t parameters = 0;
  training_record stepgraph;
  std::optional<training_record> reference;
};

/// Trains the model, twice when a comparison is asked for: from the same weights, on the same
/// passages. Shows its progress on standard error. Throws stepgraph::error, also when the loss
/// stops being finite and when a checkpoint is not one of this training.
training_result run_training(const training_settings& settings);

}  // namespace stepgraph::cli
