#pragma once

#include <CLI/CLI.hpp>

#include <string>

#include "loss_scale_options.hpp"
#include "schedule_options.hpp"
#include "training.hpp"

namespace stepgraph::cli {

/// The arguments of `stepgraph train`.
struct train_options {
  training_settings training;  ///< but for what follows
  schedule_options schedules;
  loss_scale_options loss_scale;
  std::string type = "f32";
  std::string device = "auto";
  std::string json_path;
};

void add_train_options(CLI::App& command, train_options& options);

/// The settings of a training. Throws CLI::ValidationError for options that do not fit together.
training_settings settings_of(const train_options& options);

}  // namespace stepgraph::cli
