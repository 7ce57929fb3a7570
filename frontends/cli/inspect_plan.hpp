#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "loss_scale_options.hpp"
#include "schedule_options.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::cli {

/// The arguments of `stepgraph inspect`.
struct inspect_settings {
  std::string parameters = "gpt2-124m";
  std::uint64_t tensors = 148;
  std::string parameter_format = "f32";
  std::string gradient_format = "f32";
  std::string moment_format = "f32";
  std::string master = "none";
  std::vector<std::string> foreign;   ///< NAME=before:NODE, after:NODE or applied:NODE
  std::uint64_t extra_gradients = 0;  ///< elements of a gradient without a parameter
  std::int64_t steps = 10000;         ///< of the training that the schedules are made for
  step_options options;
  std::string norm = "l2";
  loss_scale_options loss_scale;
  bool separate_norms = false;  ///< of matrices and vectors
  schedule_options schedules;
  double bandwidth = 4150.0;  ///< GB/s: what an H200 reaches with 4 reads and 3 writes and no math
  std::string json_path;
  std::string dot_path;
};

void add_plan_options(CLI::App& command, inspect_settings& settings);

/// The plan as asked for, of shapes alone. Throws CLI::ValidationError for options that do not fit
/// together.
step_plan plan_of(const inspect_settings& settings);

}  // namespace stepgraph::cli
