#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stepgraph/math/schedule.hpp"

namespace stepgraph::cli {

enum class device_choice { automatic, cpu, cuda };

/// What `stepgraph train` was asked for; checked by the caller.
struct training_settings {
  std::string text;
  std::int64_t steps = 0;
  std::int64_t batch = 0;
  std::int64_t context = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t width = 0;
  learning_rate_schedule schedule;
  double weight_decay = 0.0;  ///< of matrices; biases and norms do not decay
  double beta1 = 0.0;
  double beta2 = 0.0;
  double eps = 0.0;
  double max_grad_norm = 0.0;  ///< 0: no clipping
  std::uint64_t seed = 0;
  device_choice device = device_choice::automatic;
  bool compare = false;  ///< train once more with torch::optim::AdamW
};

/// One training from the first step to the last.
struct training_record {
  std::vector<double> losses;          ///< before each step's update
  std::vector<double> learning_rates;  ///< of each step's update
  /// Median time of clipping, update and zeroing of the gradients. On a GPU between two events on
  /// an otherwise idle stream; elsewhere by the clock.
  double optimizer_step_us = 0.0;
  /// Median time until the call of the optimizer returned; only on a GPU.
  std::optional<double> launch_us;
};

struct training_result {
  std::string backend;  ///< "graph" or "host": the executor that ran the step
  std::string device;   ///< name of the GPU, or "cpu"
  std::int64_t vocabulary = 0;
  std::int64_t characters = 0;
  std::int64_t tensors = 0;
  std::int64_t parameters = 0;
  training_record stepgraph;
  std::optional<training_record> reference;
};

/// Trains the model, twice when a comparison is asked for: from the same weights, on the same
/// passages. Shows its progress on standard error. Throws stepgraph::error, also when the loss
/// stops being finite.
training_result run_training(const training_settings& settings);

}  // namespace stepgraph::cli
