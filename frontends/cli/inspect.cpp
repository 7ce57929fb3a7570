#include <memory>

#include "command.hpp"
#include "inspect_plan.hpp"
#include "inspect_report.hpp"

namespace stepgraph::cli {
namespace {

int inspect(const inspect_settings& settings) {
  if (settings.json_path == "-" && settings.dot_path == "-") {
    throw CLI::ValidationError("--dot", "and --json cannot both go to standard output");
  }
  const step_plan plan = plan_of(settings);
  if (!settings.json_path.empty()) write_output(settings.json_path, json_of(plan, settings));
  if (!settings.dot_path.empty()) write_output(settings.dot_path, dot_of(plan));
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
      "Show what an optimizer step would run for a known list of parameters: nodes, options, "
      "schedules, bytes. Allocates nothing and needs no GPU.");
  add_plan_options(*app, *settings);
  return {app, [settings] { return inspect(*settings); }};
}

}  // namespace stepgraph::cli
