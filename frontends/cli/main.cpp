#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <vector>

#include "command.hpp"

int main(int argc, char** argv) {
  using stepgraph::cli::command;

  CLI::App program{
      "Optimizer steps as CUDA graphs: train, inspect a plan, measure, check this machine."};
  program.name("stepgraph");
  program.set_version_flag("--version", "stepgraph " STEPGRAPH_VERSION);
  program.require_subcommand(1);
  // Scripts put defaults first and pass on what they were given.
  program.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  program.option_defaults()->always_capture_default();

  try {
    const std::vector<command> commands = {
        stepgraph::cli::add_train(program), stepgraph::cli::add_inspect(program),
        stepgraph::cli::add_bench(program), stepgraph::cli::add_doctor(program)};
    program.parse(argc, argv);
    for (const command& candidate : commands) {
      if (candidate.options->parsed()) return candidate.run();
    }
    return stepgraph::cli::exit_usage;
  } catch (const CLI::Error& e) {
    // --help and --version arrive here too.
    if (e.get_exit_code() == 0) return program.exit(e);
    fmt::print(stderr,
               "stepgraph: error: {}\nTry 'stepgraph --help' or 'stepgraph COMMAND --help'.\n",
               e.what());
    return stepgraph::cli::exit_usage;
  } catch (const std::exception& e) {
    fmt::print(stderr, "stepgraph: error: {}\n", e.what());
    return stepgraph::cli::exit_failure;
  }
}
