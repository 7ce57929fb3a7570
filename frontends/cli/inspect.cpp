#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "command.hpp"
#include "parameter_lists.hpp"
#include "stepgraph/step_builder.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::cli {
namespace {

struct inspect_settings {
  std::string parameters = "gpt2-124m";
  std::uint64_t tensors = 148;
  std::string parameter_format = "f32";
  std::string gradient_format = "f32";
  std::string master = "none";
  double max_grad_norm = 0.0;
  bool skip_non_finite = false;
  bool zero_gradients = false;
  double bandwidth = 4150.0;  // GB/s: what an H200 reaches with 4 reads and 3 writes and no math
  std::string json_path;
  std::string dot_path;
};

constexpr std::array formats = {storage_format::none, storage_format::f32, storage_format::f16,
                                storage_format::bf16};

/// The format of a name that was checked when it was parsed.
storage_format format_named(const std::string& name) {
  return *std::find_if(formats.begin(), formats.end(),
                       [&](storage_format format) { return name_of(format) == name; });
}

step_plan plan_of(const inspect_settings& settings) {
  const storage_format master = format_named(settings.master);
  step_builder builder(plan_purpose::inspect);
  const group_id decay = builder.add_group({.name = "matrices", .weight_decay = 0.1});
  const group_id no_decay = builder.add_group({.name = "vectors"});
  for (const parameter_shape& parameter : parameter_list(settings.parameters, settings.tensors)) {
    const auto operand = [&](storage_format format) {
      return tensor_view{.data = nullptr,
                         .numel = parameter.numel(),
                         .format = format,
                         .device = {.kind = device_kind::cuda, .index = 0}};
    };
    tensor_operands operands{.name = parameter.name,
                             .parameter = operand(format_named(settings.parameter_format)),
                             .gradient = operand(format_named(settings.gradient_format)),
                             .master = {},
                             .exp_avg = operand(storage_format::f32),
                             .exp_avg_sq = operand(storage_format::f32)};
    if (master != storage_format::none) operands.master = operand(master);
    builder.add_tensor(parameter.shape.size() > 1 ? decay : no_decay, std::move(operands));
  }
  builder.set_options({.skip_non_finite = settings.skip_non_finite,
                       .max_grad_norm = settings.max_grad_norm,
                       .zero_gradients = settings.zero_gradients});
  return builder.build();
}

const char* name_of_kind(node_kind kind) {
  switch (kind) {
    case node_kind::grad_stats:
      return "grad_stats";
    case node_kind::advance_step:
      return "advance_step";
    case node_kind::update:
      return "update";
  }
  return "unknown";
}

/// "tuned" or "generic" for an update; nothing for the others, which have one kernel.
const char* kernel_of(const plan_node& node) {
  if (node.kind != node_kind::update) return "";
  return is_tuned(node.signature) ? "tuned" : "generic";
}

double predicted_us(std::uint64_t bytes, double bandwidth) {
  return static_cast<double>(bytes) / (bandwidth * 1e3);
}

/// 124439808 as "124,439,808".
std::string grouped(std::uint64_t value) {
  std::string text = std::to_string(value);
  for (std::size_t end = text.size(); end > 3; end -= 3) text.insert(end - 3, 1, ',');
  return text;
}

std::string text_of(const step_plan& plan, const inspect_settings& settings) {
  const double bandwidth = settings.bandwidth;
  std::string text = fmt::format(
      "{}: {} tensors, {} parameters in {} groups; clipping {}, skipping of non-finite gradients "
      "{}, "
      "zeroing of gradients {}\n\n",
      settings.parameters, plan.tensors.size(), grouped(plan.parameter_count()), plan.groups.size(),
      settings.max_grad_norm > 0.0 ? fmt::format("to norm {}", settings.max_grad_norm) : "off",
      settings.skip_non_finite ? "on" : "off", settings.zero_gradients ? "on" : "off");

  std::vector<std::array<std::string, 8>> rows = {
      {"node", "kernel", "tensors", "blocks", "threads", "MB read", "MB written", "predicted us"}};
  const auto megabytes = [](std::uint64_t bytes) {
    return fmt::format("{:.3f}", static_cast<double>(bytes) / 1e6);
  };
  for (const plan_node& node : plan.nodes) {
    rows.push_back(
        {node.name, kernel_of(node), std::to_string(node.tensors.size()), grouped(node.blocks),
         std::to_string(node.threads), megabytes(node.bytes_read), megabytes(node.bytes_written),
         fmt::format("{:.1f}", predicted_us(node.bytes_read + node.bytes_written, bandwidth))});
  }
  rows.push_back(
      {"total", "", "", "", "", megabytes(plan.bytes_read()), megabytes(plan.bytes_written()),
       fmt::format("{:.1f}", predicted_us(plan.bytes_read() + plan.bytes_written(), bandwidth))});

  std::array<std::size_t, 8> widths{};
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line = fmt::format("{:<{}}  {:<{}}", row[0], widths[0], row[1], widths[1]);
    for (std::size_t i = 2; i < row.size(); ++i) {
      line += fmt::format("  {:>{}}", row[i], widths[i]);
    }
    text += line + "\n";
  }

  text += "\nEdges:\n";
  for (const plan_edge& edge : plan.edges) {
    text += fmt::format("  {} -> {}{}\n", plan.nodes[edge.from].name, plan.nodes[edge.to].name,
                        edge.programmatic ? " (programmatic: the prologues overlap)" : "");
  }
  if (plan.edges.empty()) text += "  none\n";
  text += fmt::format(
      "\nPredicted: bytes over {:g} GB/s. The launch of the graph adds a few microseconds, which "
      "short lists are made of.\n",
      bandwidth);
  return text;
}

nlohmann::ordered_json json_of(const step_plan& plan, const inspect_settings& settings) {
  nlohmann::ordered_json nodes = nlohmann::ordered_json::array();
  for (const plan_node& node : plan.nodes) {
    nlohmann::ordered_json entry = {
        {"name", node.name},
        {"kind", name_of_kind(node.kind)},
        {"tensors", node.tensors.size()},
        {"chunks", node.chunks},
        {"blocks", node.blocks},
        {"threads", node.threads},
        {"bytes_read", node.bytes_read},
        {"bytes_written", node.bytes_written},
        {"predicted_us", predicted_us(node.bytes_read + node.bytes_written, settings.bandwidth)}};
    if (node.kind == node_kind::update) {
      entry["signature"] = name_of(node.signature);
      entry["tuned"] = is_tuned(node.signature);
    }
    nodes.push_back(std::move(entry));
  }
  nlohmann::ordered_json edges = nlohmann::ordered_json::array();
  for (const plan_edge& edge : plan.edges) {
    edges.push_back({{"from", plan.nodes[edge.from].name},
                     {"to", plan.nodes[edge.to].name},
                     {"programmatic", edge.programmatic}});
  }
  return {
      {"parameters", settings.parameters},
      {"tensors", plan.tensors.size()},
      {"parameter_count", plan.parameter_count()},
      {"groups", plan.groups.size()},
      {"max_grad_norm", settings.max_grad_norm},
      {"skip_non_finite", settings.skip_non_finite},
      {"zero_gradients", settings.zero_gradients},
      {"bandwidth_gb_s", settings.bandwidth},
      {"nodes", std::move(nodes)},
      {"edges", std::move(edges)},
      {"bytes_read", plan.bytes_read()},
      {"bytes_written", plan.bytes_written()},
      {"predicted_us", predicted_us(plan.bytes_read() + plan.bytes_written(), settings.bandwidth)}};
}

int inspect(const inspect_settings& settings) {
  if (settings.json_path == "-" && settings.dot_path == "-") {
    throw CLI::ValidationError("--dot", "and --json cannot both go to standard output");
  }
  const step_plan plan = plan_of(settings);
  if (!settings.json_path.empty()) {
    write_output(settings.json_path, json_of(plan, settings).dump(2) + "\n");
  }
  if (!settings.dot_path.empty()) write_output(settings.dot_path, to_dot(plan));
  // Standard output carries one thing at a time.
  if (settings.json_path != "-" && settings.dot_path != "-") {
    write_output("-", text_of(plan, settings));
  }
  return exit_success;
}

}  // namespace

command add_inspect(CLI::App& program) {
  const auto settings = std::make_shared<inspect_settings>();
  CLI::App* app = program.add_subcommand(
      "inspect",
      "Show what an optimizer step would run for a known list of parameters. Allocates "
      "nothing and needs no GPU.");

  const CLI::IsMember format_names({"f32", "f16", "bf16"});
  app->add_option("--parameters", settings->parameters, "Parameter list")
      ->check(CLI::IsMember(parameter_list_names()));
  app->add_option("--tensors", settings->tensors, "Length of the list nx4096")
      ->check(CLI::Range(1, 1000000));
  app->add_option("--parameter-format", settings->parameter_format, "Storage of the parameters")
      ->check(format_names);
  app->add_option("--gradient-format", settings->gradient_format, "Storage of the gradients")
      ->check(format_names);
  app->add_option("--master", settings->master, "Master copy of the parameters")
      ->check(CLI::IsMember({"none", "f32"}));
  app->add_option("--clip", settings->max_grad_norm, "Largest gradient norm; 0: no clipping")
      ->check(check_not_negative);
  app->add_flag("--skip-non-finite", settings->skip_non_finite,
                "Leave everything untouched when a gradient is not finite");
  app->add_flag("--zero-gradients", settings->zero_gradients, "Zero the gradients in the update");
  app->add_option("--bandwidth", settings->bandwidth,
                  "Memory bandwidth in GB/s for the predicted times; the default is an H200's")
      ->check(check_positive);
  app->add_option("--json", settings->json_path, "Write the plan as JSON; '-': standard output")
      ->type_name("FILE");
  app->add_option("--dot", settings->dot_path, "Write the plan for Graphviz; '-': standard output")
      ->type_name("FILE");
  return {app, [settings] { return inspect(*settings); }};
}

}  // namespace stepgraph::cli
