#include "train_options.hpp"

#include <fmt/format.h>

#include "command.hpp"

namespace stepgraph::cli {

void add_train_options(CLI::App& command, train_options& options) {
  training_settings& training = options.training;
  training.steps = 300;
  training.batch = 16;
  training.context = 128;
  training.layers = 4;
  training.heads = 4;
  training.width = 128;
  training.beta1 = 0.9;
  training.beta2 = 0.99;
  training.eps = 1e-8;
  training.max_grad_norm = 1.0;
  training.seed = 1;
  options.schedules.name = "cosine";
  options.schedules.weight_decay = 0.1;

  command
      .add_option("--text", training.text, "Text to train on; default: a licence of this system")
      ->type_name("FILE");
  command
      .add_option("--steps", training.steps, "Optimizer steps, those before a --resume included")
      ->check(CLI::Range(1, 100000000));
  command.add_option("--batch", training.batch, "Passages in a step")->check(CLI::Range(1, 65536));
  command.add_option("--context", training.context, "Characters in a passage")
      ->check(CLI::Range(1, 16384));
  command.add_option("--layers", training.layers, "Transformer blocks")->check(CLI::Range(1, 256));
  command.add_option("--heads", training.heads, "Attention heads of a block")
      ->check(CLI::Range(1, 256));
  command.add_option("--width", training.width, "Width of the model; a multiple of --heads")
      ->check(CLI::Range(1, 16384));
  command
      .add_option("--dtype", options.type,
                  "Type of the model and its gradients; bf16 and f16 have f32 masters")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  add_loss_scale_options(command, options.loss_scale);
  add_schedule_options(command, options.schedules);
  command.add_option("--beta1", training.beta1, "Decay of the first moment")->check(check_beta);
  command.add_option("--beta2", training.beta2, "Decay of the second moment")->check(check_beta);
  command.add_option("--eps", training.eps, "Added to the root of the second moment")
      ->check(check_positive);
  add_norm_options(command, training.max_grad_norm, training.skip_above_norm);
  command.add_option("--seed", training.seed, "Of the weights and of the passages")
      ->check(CLI::NonNegativeNumber);
  command.add_option("--device", options.device, "Where to train")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command.add_flag("--compare", training.compare,
                   "Train once more with torch::optim::AdamW, from the same weights on the same "
                   "passages");
  command
      .add_option("--save", training.save_path,
                  "Write a checkpoint at the end, and every --save-every steps")
      ->type_name("FILE");
  command.add_option("--save-every", training.save_every, "Steps between two checkpoints; 0: none")
      ->check(CLI::Range(0, 100000000));
  command
      .add_option("--resume", training.resume_path,
                  "Go on from a checkpoint, to the same bits as without the interruption. All "
                  "options but --steps, --device and the files must be those it was written with; "
                  "give --decay-steps and --warmup where they follow from --steps")
      ->type_name("FILE");
  command.add_option("--json", options.json_path, "Write the result as JSON; '-': standard output")
      ->type_name("FILE");
}

training_settings settings_of(const train_options& options) {
  training_settings settings = options.training;
  if (settings.width % settings.heads != 0) {
    throw CLI::ValidationError("--width", fmt::format("{} is not a multiple of --heads {}",
                                                      settings.width, settings.heads));
  }
  if (settings.save_every > 0 && settings.save_path.empty()) {
    throw CLI::ValidationError("--save-every", "needs --save FILE");
  }
  if (settings.compare && !settings.resume_path.empty()) {
    throw CLI::ValidationError("--resume", "excludes --compare: checkpoints hold no reference");
  }
  settings.learning_rate = learning_rate_of(options.schedules, settings.steps);
  settings.weight_decay = options.schedules.weight_decay;
  settings.weight_decay_schedule = weight_decay_of(options.schedules, settings.steps);
  settings.type = options.type == "bf16"  ? parameter_type::bf16
                  : options.type == "f16" ? parameter_type::f16
                                          : parameter_type::f32;
  settings.scaling = scaling_of(options.loss_scale, options.type == "f16" ? "torch" : "none");
  settings.loss_scale = first_loss_scale(options.loss_scale, settings.scaling);
  settings.device = options.device == "cpu"    ? device_choice::cpu
                    : options.device == "cuda" ? device_choice::cuda
                                               : device_choice::automatic;
  return settings;
}

}  // namespace stepgraph::cli
