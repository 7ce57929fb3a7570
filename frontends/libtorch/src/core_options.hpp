#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "stepgraph/libtorch/adam_options.hpp"
#include "stepgraph/libtorch/step_options.hpp"

/// The user's options in the terms of the core.
namespace stepgraph::libtorch::detail {

using param_groups = std::vector<torch::optim::OptimizerParamGroup>;
using param_states = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// The options of group number `index`. Throws usage_error if they are of another optimizer's type.
AdamOptions& options_of(torch::optim::OptimizerParamGroup& group, std::size_t index);

/// Both throw usage_error for an input tensor that is not one float32.
group_options to_core(const AdamOptions& options, std::string name, std::uint64_t step);
step_options to_core(const StepOptions& options);

/// True if nothing differs but the hyperparameters that reach a running executor.
bool same_plan_options(const AdamOptions& a, const AdamOptions& b);

/// The state of a parameter, or null.
AdamParamState* find_state(const param_states& states, const at::Tensor& parameter);

}  // namespace stepgraph::libtorch::detail
