#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "command.hpp"
#include "train_options.hpp"

#if defined(STEPGRAPH_HAS_TORCH)
#include "text_data.hpp"
#include "train_report.hpp"
#endif

namespace stepgraph::cli {
namespace {

#if defined(STEPGRAPH_HAS_TORCH)

int train(const train_options& options) {
  training_settings settings = settings_of(options);
  if (settings.text.empty()) settings.text = default_text_path();
  require_writable(options.json_path);
  require_writable(settings.save_path);

  const training_result result = run_training(settings);
  if (!options.json_path.empty()) write_output(options.json_path, json_of(settings, result));
  if (options.json_path != "-") write_output("-", text_of(settings, result));
  return exit_success;
}

#else

int train(const train_options& options) {
  // The arguments are judged as in a program that can train.
  settings_of(options);
  fmt::print(
      stderr,
      "stepgraph: error: this program was built without torch, which 'train' needs; configure "
      "with -DSTEPGRAPH_TORCH=ON\n");
  return exit_usage;
}

#endif

}  // namespace

command add_train(CLI::App& program) {
  const auto options = std::make_shared<train_options>();
  CLI::App* app = program.add_subcommand(
      "train",
      "Train a small character-level transformer, the optimizer step as a CUDA graph on a "
      "GPU and by the host executor elsewhere.");
  add_train_options(*app, *options);
  return {app, [options] { return train(*options); }};
}

}  // namespace stepgraph::cli
