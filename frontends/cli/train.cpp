#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "command.hpp"
#include "text_data.hpp"
#include "training.hpp"

namespace stepgraph::cli {
namespace {

struct train_options {
  training_settings training;
  double learning_rate = 3e-3;
  double minimum_learning_rate = 0.0;
  std::int64_t warmup = 0;
  std::string schedule = "cosine";
  std::string device = "auto";
  std::string json_path;
  CLI::Option* minimum_given = nullptr;
  CLI::Option* warmup_given = nullptr;
};

/// The schedule in the terms of the device, whose clock shows 0 in the first step and steps - 1 in
/// the last.
learning_rate_schedule schedule_of(const train_options& options) {
  const std::int64_t steps = options.training.steps;
  const std::int64_t warmup = *options.warmup_given ? options.warmup : steps / 10;
  if (warmup >= steps) {
    throw CLI::ValidationError("--warmup",
                               fmt::format("{} leaves none of {} steps", warmup, steps));
  }
  const double maximum = options.learning_rate;
  const double minimum = *options.minimum_given ? options.minimum_learning_rate : maximum / 10.0;
  if (minimum > maximum) throw CLI::ValidationError("--min-lr", "is larger than --lr");

  learning_rate_schedule schedule;
  schedule.shape = options.schedule == "constant" ? schedule_shape::constant
                   : options.schedule == "linear" ? schedule_shape::linear
                                                  : schedule_shape::cosine;
  // A warm-up of w steps is the line through lr / (w + 1) in the first step and lr after it: no
  // step is wasted on a learning rate of zero.
  schedule.initial = maximum / static_cast<double>(warmup + 1);
  schedule.maximum = maximum;
  schedule.minimum = minimum;
  schedule.warmup_steps = static_cast<std::uint64_t>(warmup);
  schedule.decay_steps = static_cast<std::uint64_t>(std::max(steps - 1, warmup + 1));
  return schedule;
}

/// The settings of a training; refuses options that do not fit together.
training_settings settings_of(const train_options& options) {
  training_settings settings = options.training;
  if (settings.width % settings.heads != 0) {
    throw CLI::ValidationError("--width", fmt::format("{} is not a multiple of --heads {}",
                                                      settings.width, settings.heads));
  }
  settings.schedule = schedule_of(options);
  settings.device = options.device == "cpu"    ? device_choice::cpu
                    : options.device == "cuda" ? device_choice::cuda
                                               : device_choice::automatic;
  return settings;
}

#if defined(STEPGRAPH_HAS_TORCH)

double max_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

nlohmann::ordered_json json_of(const training_settings& settings, const training_result& result) {
  using json = nlohmann::ordered_json;
  const training_record& ours = result.stepgraph;
  const training_record* reference = result.reference ? &*result.reference : nullptr;
  const auto when_compared = [&](auto value) { return reference ? json(value()) : json(nullptr); };
  return {
      {"backend", result.backend},
      {"device", result.device},
      {"steps", settings.steps},
      {"first_loss", ours.losses.front()},
      {"final_loss", ours.losses.back()},
      {"reference_final_loss", when_compared([&] { return reference->losses.back(); })},
      {"max_loss_difference",
       when_compared([&] { return max_difference(ours.losses, reference->losses); })},
      {"optimizer_step_us", ours.optimizer_step_us},
      {"reference_optimizer_step_us", when_compared([&] { return reference->optimizer_step_us; })},
      {"replay_launch_us", ours.launch_us ? json(*ours.launch_us) : json(nullptr)},
      {"text", settings.text},
      {"characters", result.characters},
      {"vocabulary", result.vocabulary},
      {"tensors", result.tensors},
      {"parameters", result.parameters},
      {"batch", settings.batch},
      {"context", settings.context},
      {"seed", settings.seed},
      {"losses", ours.losses},
      {"reference_losses", when_compared([&] { return reference->losses; })},
      {"learning_rates", ours.learning_rates}};
}

std::string text_of(const training_settings& settings, const training_result& result) {
  const training_record& ours = result.stepgraph;
  std::string text = fmt::format(
      "{} steps on {} by the {} executor: {} parameters in {} tensors, {} characters of {}\n"
      "  stepgraph            loss {:.4f} -> {:.4f}  optimizer step {:.1f} us{}\n",
      settings.steps, result.device, result.backend, result.parameters, result.tensors,
      result.characters, settings.text, ours.losses.front(), ours.losses.back(),
      ours.optimizer_step_us,
      ours.launch_us ? fmt::format(", launch {:.1f} us", *ours.launch_us) : "");
  if (result.reference) {
    const training_record& reference = *result.reference;
    text += fmt::format(
        "  torch::optim::AdamW  loss {:.4f} -> {:.4f}  optimizer step {:.1f} us\n"
        "  largest difference of the two losses in any step: {:.2e}\n",
        reference.losses.front(), reference.losses.back(), reference.optimizer_step_us,
        max_difference(ours.losses, reference.losses));
  }
  return text;
}

int train(const train_options& options) {
  training_settings settings = settings_of(options);
  if (settings.text.empty()) settings.text = default_text_path();
  require_writable(options.json_path);

  const training_result result = run_training(settings);
  if (!options.json_path.empty()) {
    write_output(options.json_path, json_of(settings, result).dump(2) + "\n");
  }
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
  training_settings& training = options->training;
  training = {.text = "",
              .steps = 300,
              .batch = 16,
              .context = 128,
              .layers = 4,
              .heads = 4,
              .width = 128,
              .schedule = {},
              .weight_decay = 0.1,
              .beta1 = 0.9,
              .beta2 = 0.99,
              .eps = 1e-8,
              .max_grad_norm = 1.0,
              .seed = 1,
              .device = device_choice::automatic,
              .compare = false};
  CLI::App* app = program.add_subcommand(
      "train",
      "Train a small character-level transformer, the optimizer step as a CUDA graph on a "
      "GPU and by the host executor elsewhere.");

  app->add_option("--text", training.text, "Text to train on; default: a licence of this system")
      ->type_name("FILE");
  app->add_option("--steps", training.steps, "Optimizer steps")->check(CLI::Range(1, 100000000));
  app->add_option("--batch", training.batch, "Passages in a step")->check(CLI::Range(1, 65536));
  app->add_option("--context", training.context, "Characters in a passage")
      ->check(CLI::Range(1, 16384));
  app->add_option("--layers", training.layers, "Transformer blocks")->check(CLI::Range(1, 256));
  app->add_option("--heads", training.heads, "Attention heads of a block")
      ->check(CLI::Range(1, 256));
  app->add_option("--width", training.width, "Width of the model; a multiple of --heads")
      ->check(CLI::Range(1, 16384));
  app->add_option("--lr", options->learning_rate, "Largest learning rate")->check(check_positive);
  options->warmup_given = app->add_option("--warmup", options->warmup,
                                          "Steps of linear warm-up; default: a tenth of --steps")
                              ->check(CLI::Range(0, 100000000))
                              ->default_str("");
  app->add_option("--schedule", options->schedule, "Learning rate after the warm-up")
      ->check(CLI::IsMember({"constant", "linear", "cosine"}));
  options->minimum_given =
      app->add_option("--min-lr", options->minimum_learning_rate,
                      "Learning rate of the last step, unless constant; default: a tenth of --lr")
          ->check(check_not_negative)
          ->default_str("");
  app->add_option("--weight-decay", training.weight_decay,
                  "Decoupled weight decay of matrices; vectors do not decay")
      ->check(check_not_negative);
  app->add_option("--beta1", training.beta1, "Decay of the first moment")->check(check_beta);
  app->add_option("--beta2", training.beta2, "Decay of the second moment")->check(check_beta);
  app->add_option("--eps", training.eps, "Added to the root of the second moment")
      ->check(check_positive);
  app->add_option("--clip", training.max_grad_norm, "Largest gradient norm; 0: no clipping")
      ->check(check_not_negative);
  app->add_option("--seed", training.seed, "Of the weights and of the passages")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--device", options->device, "Where to train")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app->add_flag("--compare", training.compare,
                "Train once more with torch::optim::AdamW, from the same weights on the same "
                "passages");
  app->add_option("--json", options->json_path, "Write the result as JSON; '-': standard output")
      ->type_name("FILE");
  return {app, [options] { return train(*options); }};
}

}  // namespace stepgraph::cli
