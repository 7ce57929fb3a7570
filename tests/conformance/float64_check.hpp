#pragma once

#include <vector>

#include "common/executor_adapter.hpp"

namespace stepgraph::test {

/// The hyperparameters in force at a step: those of the problem unless a test changed them.
struct step_in_force {
  std::vector<group_options> groups;
  step_options options;

  explicit step_in_force(const test_problem& problem)
      : groups(problem.groups), options(problem.options) {}
};

/// Launches one step and expects it to be, within the roundings of f32, the step that float64 makes
/// of the same stored operands: moments, parameters and masters, learning rates, norm and clip.
void launch_and_check_against_float64(executor_adapter& adapter, const step_in_force& in_force);

/// The same for the problem's own hyperparameters over `steps` steps with fresh gradients.
void run_and_check_against_float64(executor_adapter& adapter, int steps);

}  // namespace stepgraph::test
