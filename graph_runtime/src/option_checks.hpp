#pragma once

#include <cstdint>
#include <string>

#include "stepgraph/step_plan.hpp"

/// The refusals that the builder and the setters of a live executor share. Each throws usage_error
/// with the name of the group or tensor, what was expected and what was found.
namespace stepgraph::detail {

void check_learning_rate(const std::string& group, double value);
void check_weight_decay(const std::string& group, double value);
void check_betas(const std::string& group, double beta1, double beta2);
void check_eps(const std::string& group, double value);
void check_schedule(const std::string& group, const char* option, const schedule& checked);
void check_group_options(const group_options& options);
void check_loss_scale(double value);
void check_max_grad_norm(double value);
void check_skip_above_norm(double value);
void check_step_options(const step_options& options);

/// A plan that no executor can run: built to inspect shapes.
void check_runnable(const step_plan& plan);

/// Null (unless there are no elements) or misaligned for the format.
void check_address(const std::string& tensor, const char* operand, const void* data,
                   std::uint64_t numel, storage_format format);

}  // namespace stepgraph::detail
