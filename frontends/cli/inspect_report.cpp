#include "inspect_report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <vector>

#include "schedule_text.hpp"
#include "setting_names.hpp"
#include "text_table.hpp"

namespace stepgraph::cli {
namespace {

const char* kind_of(const plan_node& node) {
  switch (node.kind) {
    case node_kind::grad_stats:
      return "grad_stats";
    case node_kind::advance_step:
      return "advance_step";
    case node_kind::update:
      return "update";
    case node_kind::scale_gradients:
      return "scale_gradients";
    case node_kind::foreign:
      return "foreign";
  }
  return "unknown";
}

/// "tuned" or "generic" for an update, what foreign work depends on; nothing for the others, which
/// have one kernel.
const char* kernel_of(const plan_node& node) {
  if (node.kind == node_kind::foreign) return node.only_if_applied ? "yours, if applied" : "yours";
  if (node.kind != node_kind::update) return "";
  return is_tuned(node.signature) ? "tuned" : "generic";
}

double predicted_us(std::uint64_t bytes, double bandwidth) {
  return static_cast<double>(bytes) / (bandwidth * 1e3);
}

const char* on_or_off(bool value) { return value ? "on" : "off"; }

const char* norm_name(norm_kind norm) { return norm == norm_kind::infinity ? "infinity" : "l2"; }

std::string text_of(const loss_scaling& scaling, double first) {
  if (scaling.rule == loss_scale_rule::fixed) {
    return first == 1.0 ? "none" : fmt::format("{} always", first);
  }
  const std::string text = fmt::format(
      "{} at first, by the rule of {}: times {} after {} finite steps in a row, times {}", first,
      name_of(scaling.rule), scaling.growth_factor, scaling.growth_interval,
      scaling.backoff_factor);
  if (scaling.rule == loss_scale_rule::torch_amp) return text + " after one that is not";
  return text +
         fmt::format(" after {} that are not, never below {}", scaling.hysteresis, scaling.minimum);
}

/// What each option that is on does; the order of the step.
std::vector<std::string> option_lines(const step_plan& plan) {
  const step_options& options = plan.options;
  std::vector<std::string> lines;
  if (!measures_gradients(options)) {
    lines.emplace_back("gradients are not looked at before the update");
  } else {
    lines.push_back(fmt::format("norm of the gradient: {}, in {} norm group{}",
                                norm_name(options.norm), plan.norm_groups.size(),
                                plan.norm_groups.size() == 1 ? "" : "s"));
  }
  lines.push_back("loss scale: " + text_of(options.scaling, options.loss_scale));
  if (skips_non_finite(options)) lines.emplace_back("skipped: a gradient that is not finite");
  if (options.skip_above_norm > 0.0) {
    lines.push_back(fmt::format("skipped: a norm above {}", options.skip_above_norm));
  }
  if (options.count_zeros) lines.emplace_back("zeros of the gradient are counted");
  if (options.exchange_totals) {
    lines.emplace_back("work between devices combines the sums after grad_stats");
  }
  if (options.unscale_gradients) lines.emplace_back("gradients are left unscaled and clipped");
  if (options.stochastic_rounding) lines.emplace_back("bf16 parameters are rounded at random");
  if (options.samples_per_step > 0) {
    lines.push_back(fmt::format("samples: {} a step", options.samples_per_step));
  }
  if (options.record_capacity > 0) {
    lines.push_back(fmt::format("records: of the last {} steps", options.record_capacity));
  }
  return lines;
}

std::string value_text(double value, const std::optional<schedule>& scheduled) {
  if (!scheduled) return fmt::format("{}", value);
  return fmt::format("by schedule\n      {}", fmt::join(describe(*scheduled), "\n      "));
}

std::string groups_text(const step_plan& plan) {
  std::string text = "\nGroups:\n";
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const group_options& group = plan.groups[g];
    text += fmt::format("  {}\n    learning rate {}\n    weight decay {}\n", group.name,
                        value_text(group.learning_rate, group.learning_rate_schedule),
                        value_text(group.weight_decay, group.weight_decay_schedule));
  }
  return text;
}

std::string nodes_text(const step_plan& plan, double bandwidth) {
  std::vector<std::vector<std::string>> rows = {
      {"node", "kernel", "tensors", "blocks", "threads", "MB read", "MB written", "predicted us"}};
  const auto megabytes = [](std::uint64_t bytes) {
    return fmt::format("{:.3f}", static_cast<double>(bytes) / 1e6);
  };
  const auto microseconds = [&](std::uint64_t bytes) {
    return fmt::format("{:.1f}", predicted_us(bytes, bandwidth));
  };
  for (const plan_node& node : plan.nodes) {
    rows.push_back({node.name, kernel_of(node), std::to_string(node.tensors.size()),
                    grouped(node.blocks), std::to_string(node.threads), megabytes(node.bytes_read),
                    megabytes(node.bytes_written),
                    microseconds(node.bytes_read + node.bytes_written)});
  }
  rows.push_back({"total", "", "", "", "", megabytes(plan.bytes_read()),
                  megabytes(plan.bytes_written()),
                  microseconds(plan.bytes_read() + plan.bytes_written())});
  return aligned(rows, 2);
}

nlohmann::ordered_json json_of(const plan_node& node, double bandwidth) {
  nlohmann::ordered_json entry = {
      {"name", node.name},
      {"kind", kind_of(node)},
      {"tensors", node.tensors.size()},
      {"chunks", node.chunks},
      {"blocks", node.blocks},
      {"threads", node.threads},
      {"bytes_read", node.bytes_read},
      {"bytes_written", node.bytes_written},
      {"predicted_us", predicted_us(node.bytes_read + node.bytes_written, bandwidth)}};
  if (node.kind == node_kind::update) {
    entry["signature"] = name_of(node.signature);
    entry["tuned"] = is_tuned(node.signature);
  }
  if (node.kind == node_kind::foreign) entry["only_if_applied"] = node.only_if_applied;
  return entry;
}

nlohmann::ordered_json json_of(const std::optional<schedule>& described) {
  if (!described) return nullptr;
  return {{"clock", described->clock == schedule_clock::samples ? "samples" : "updates"},
          {"segments", describe(*described)}};
}

nlohmann::ordered_json json_of(const step_options& options) {
  return {{"norm", norm_name(options.norm)},
          {"measures_gradients", measures_gradients(options)},
          {"skips_non_finite", skips_non_finite(options)},
          {"skip_above_norm", options.skip_above_norm},
          {"count_zeros", options.count_zeros},
          {"exchange_totals", options.exchange_totals},
          {"loss_scale", options.loss_scale},
          {"loss_scaling", name_of(options.scaling.rule)},
          {"growth_interval", options.scaling.growth_interval},
          {"unscale_gradients", options.unscale_gradients},
          {"stochastic_rounding", options.stochastic_rounding},
          {"samples_per_step", options.samples_per_step},
          {"record_capacity", options.record_capacity}};
}

}  // namespace

std::string text_of(const step_plan& plan, const inspect_settings& settings) {
  const step_options& options = plan.options;
  std::string text = fmt::format(
      "{}: {} tensors, {} parameters in {} groups; clipping {}, skipping of non-finite gradients "
      "{}, zeroing of gradients {}\n\n",
      settings.parameters, plan.tensors.size(), grouped(plan.parameter_count()), plan.groups.size(),
      options.max_grad_norm > 0.0 ? fmt::format("to norm {}", options.max_grad_norm) : "off",
      on_or_off(skips_non_finite(options)), on_or_off(options.zero_gradients));
  text += nodes_text(plan, settings.bandwidth);

  text += "\nEdges:\n";
  for (const plan_edge& edge : plan.edges) {
    text += fmt::format("  {} -> {}{}\n", plan.nodes[edge.from].name, plan.nodes[edge.to].name,
                        edge.programmatic ? " (programmatic: the prologues overlap)" : "");
  }
  if (plan.edges.empty()) text += "  none\n";

  text += "\nStep:\n";
  for (const std::string& line : option_lines(plan)) text += "  " + line + "\n";
  text += groups_text(plan);
  text += fmt::format(
      "\nPredicted: bytes over {:g} GB/s. The launch of the graph adds a few microseconds, which "
      "short lists are made of.\n",
      settings.bandwidth);
  return text;
}

std::string json_of(const step_plan& plan, const inspect_settings& settings) {
  nlohmann::ordered_json nodes = nlohmann::ordered_json::array();
  for (const plan_node& node : plan.nodes) nodes.push_back(json_of(node, settings.bandwidth));
  nlohmann::ordered_json edges = nlohmann::ordered_json::array();
  for (const plan_edge& edge : plan.edges) {
    edges.push_back({{"from", plan.nodes[edge.from].name},
                     {"to", plan.nodes[edge.to].name},
                     {"programmatic", edge.programmatic}});
  }
  nlohmann::ordered_json groups = nlohmann::ordered_json::array();
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const group_options& group = plan.groups[g];
    groups.push_back({{"name", group.name},
                      {"norm_group", plan.norm_groups[plan.norm_group_of[g]]},
                      {"learning_rate", group.learning_rate},
                      {"learning_rate_schedule", json_of(group.learning_rate_schedule)},
                      {"weight_decay", group.weight_decay},
                      {"weight_decay_schedule", json_of(group.weight_decay_schedule)}});
  }
  const nlohmann::ordered_json result = {
      {"parameters", settings.parameters},
      {"tensors", plan.tensors.size()},
      {"parameter_count", plan.parameter_count()},
      {"groups", plan.groups.size()},
      {"max_grad_norm", plan.options.max_grad_norm},
      {"skip_non_finite", plan.options.skip_non_finite},
      {"zero_gradients", plan.options.zero_gradients},
      {"bandwidth_gb_s", settings.bandwidth},
      {"nodes", std::move(nodes)},
      {"edges", std::move(edges)},
      {"bytes_read", plan.bytes_read()},
      {"bytes_written", plan.bytes_written()},
      {"predicted_us", predicted_us(plan.bytes_read() + plan.bytes_written(), settings.bandwidth)},
      {"options", json_of(plan.options)},
      {"group_list", std::move(groups)},
      {"norm_groups", plan.norm_groups}};
  return result.dump(2) + "\n";
}

std::string dot_of(const step_plan& plan) {
  std::string dot = to_dot(plan);
  const std::size_t body = dot.find('\n') + 1;
  dot.insert(body, fmt::format("  labelloc=b;\n  label=\"{}\\l\";\n",
                               fmt::join(option_lines(plan), "\\l")));
  return dot;
}

}  // namespace stepgraph::cli
