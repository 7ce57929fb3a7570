#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include "stepgraph/math/loss_scale.hpp"

namespace stepgraph::cli {

/// How a loss scale was asked for.
struct loss_scale_options {
  std::optional<std::string> rule;  ///< "none", "torch", "megatron"
  std::optional<double> first;
  std::optional<std::uint32_t> growth_interval;
};

/// Adds --loss-scaling, --loss-scale and --growth-interval. `options` must outlive the parsing.
void add_loss_scale_options(CLI::App& command, loss_scale_options& options);

/// The rule and the first scale; `by_default` is the rule when none was asked for. Throws
/// CLI::ValidationError for numbers that the rule does not use.
loss_scaling scaling_of(const loss_scale_options& options, const char* by_default);
double first_loss_scale(const loss_scale_options& options, const loss_scaling& scaling);

}  // namespace stepgraph::cli
