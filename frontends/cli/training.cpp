#include "training.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "char_transformer.hpp"
#include "digest.hpp"
#include "progress_line.hpp"
#include "step_timer.hpp"
#include "stepgraph/error.hpp"
#include "text_data.hpp"
#include "torch_backend.hpp"
#include "training_checkpoint.hpp"
#include "training_optimizers.hpp"

namespace stepgraph::cli {
namespace {

torch::ScalarType scalar_type_of(parameter_type type) {
  switch (type) {
    case parameter_type::f32:
      return torch::kFloat;
    case parameter_type::bf16:
      return torch::kBFloat16;
    case parameter_type::f16:
      return torch::kHalf;
  }
  return torch::kFloat;
}

torch::Tensor to_tensor(std::vector<std::int64_t>& tokens, const training_settings& settings,
                        torch::Device device) {
  // The clone outlives the vector.
  return torch::from_blob(tokens.data(), {settings.batch, settings.context}, torch::kInt64)
      .clone()
      .to(device);
}

std::string digest_of(const std::vector<torch::Tensor>& tensors) {
  digest result;
  for (const torch::Tensor& tensor : tensors) {
    const torch::Tensor bytes = tensor.detach().cpu().contiguous();
    result.add(bytes.const_data_ptr(), bytes.nbytes());
  }
  return result.text();
}

/// One model on its way through the steps.
class training {
 public:
  training(std::string label, char_transformer& model, step_optimizer& optimizer,
           batch_sampler& sampler, const training_settings& settings, torch::Device device)
      : label_(std::move(label)),
        model_(model),
        optimizer_(optimizer),
        sampler_(sampler),
        settings_(settings),
        device_(device),
        timer_(device.is_cuda()),
        progress_(label_, settings.steps) {}

  /// Makes the steps from `first` (counted from 0) on; `after_step` is called with the number of
  /// steps done.
  training_record run(std::int64_t first, const std::function<void(std::int64_t)>& after_step) {
    for (std::int64_t step = first; step < settings_.steps; ++step) {
      const double loss = backward(step);
      optimizer_.prepare();
      timer_.start();
      optimizer_.step();
      const double step_us = timer_.stop();
      note(step, loss, step_us);
      after_step(step + 1);
    }
    record_.final_loss_scale = optimizer_.next_loss_scale();
    record_.parameters_digest = digest_of(model_.parameters());
    record_.optimizer_step_us = timer_.median_step_us();
    record_.launch_us = timer_.median_launch_us();
    return std::move(record_);
  }

 private:
  /// The loss of the next passages; leaves its gradients, scaled.
  double backward(std::int64_t step) {
    token_batch batch = sampler_.next();
    const torch::Tensor logits = model_.forward(to_tensor(batch.inputs, settings_, device_));
    // In f32 whatever the model's type, which a sum over the passage would exceed.
    const torch::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1).to(torch::kFloat),
        to_tensor(batch.targets, settings_, device_).flatten());
    (settings_.scales_loss() ? loss * optimizer_.loss_scale() : loss).backward();
    const double value = loss.item<double>();
    if (!std::isfinite(value)) {
      throw error(fmt::format("{}: the loss of step {} is not finite; try a smaller --lr", label_,
                              step + 1));
    }
    return value;
  }

  void note(std::int64_t step, double loss, double step_us) {
    const step_report report = optimizer_.report();
    record_.losses.push_back(loss);
    record_.learning_rates.push_back(report.learning_rate);
    record_.weight_decays.push_back(report.weight_decay);
    record_.grad_norms.push_back(report.grad_norm);
    record_.loss_scales.push_back(report.loss_scale);
    if (report.skipped) record_.skipped_steps.push_back(step + 1);

    std::string text = fmt::format("loss {:.4f}  lr {:.2e}", loss, report.learning_rate);
    if (settings_.scales_loss()) text += fmt::format("  scale {:g}", report.loss_scale);
    if (report.grad_norm != 0.0) text += fmt::format("  norm {:.3f}", report.grad_norm);
    if (report.skipped) text += "  skipped";
    progress_.update(step + 1, fmt::format("{}  optimizer {:.0f} us", text, step_us));
  }

  std::string label_;
  char_transformer& model_;
  step_optimizer& optimizer_;
  batch_sampler& sampler_;
  const training_settings& settings_;
  torch::Device device_;
  step_timer timer_;
  progress_line progress_;
  training_record record_;
};

torch::Device choose_device(device_choice choice) {
  if (choice == device_choice::cpu) return torch::kCPU;
  const torch_backend backend = find_torch_backend();
  if (backend.cuda_problem.empty()) return torch::Device(torch::kCUDA, 0);
  if (choice == device_choice::cuda) {
    throw error(fmt::format("--device cuda: {}", backend.cuda_problem));
  }
  fmt::print(stderr, "stepgraph: training on the CPU: {}\n", backend.cuda_problem);
  return torch::kCPU;
}

void copy_parameters(const char_transformer& from, const char_transformer& to) {
  const torch::NoGradGuard no_grad;
  const std::vector<torch::Tensor> sources = from.parameters();
  std::vector<torch::Tensor> targets = to.parameters();
  for (std::size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i]);
}

/// Trains with stepgraph, from a checkpoint if there is one to go on from.
void train_stepgraph(char_transformer& model, const text_data& text,
                     const training_settings& settings, torch::Device device,
                     training_result& result) {
  batch_sampler sampler(text, settings.batch, settings.context, settings.seed);
  stepgraph_optimizer optimizer(model, settings);
  const training_state state{model, optimizer.optimizer(), sampler};
  const run_description description = describe_run(settings, text);
  std::int64_t done = 0;
  if (!settings.resume_path.empty()) {
    done = load_checkpoint(settings.resume_path, state, description);
    if (done >= settings.steps) {
      throw error(fmt::format("--resume: '{}' is at step {}, nothing is left of --steps {}",
                              settings.resume_path, done, settings.steps));
    }
  }
  result.first_step = done + 1;
  const auto save_if_due = [&](std::int64_t steps_done) {
    const bool due = steps_done == settings.steps ||
                     (settings.save_every > 0 && steps_done % settings.save_every == 0);
    if (settings.save_path.empty() || !due) return;
    save_checkpoint(settings.save_path, state, steps_done, description);
  };
  result.stepgraph =
      training("stepgraph", model, optimizer, sampler, settings, device).run(done, save_if_due);
  result.stepgraph.state_digest = digest_of(optimizer.states());
}

training_result train_as_asked(const training_settings& settings) {
  // Respect what the user set for every OpenMP program.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    torch::set_num_threads(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  }
  const text_data text = text_data::from_file(settings.text);
  // Refuses a short text before anything is built.
  batch_sampler(text, settings.batch, settings.context, settings.seed);
  const torch::Device device = choose_device(settings.device);
  const torch::ScalarType type = scalar_type_of(settings.type);

  const char_transformer_options options{.vocabulary = text.vocabulary(),
                                         .context = settings.context,
                                         .layers = settings.layers,
                                         .heads = settings.heads,
                                         .width = settings.width};
  torch::manual_seed(settings.seed);
  char_transformer model(options);
  model.to(device, type);
  std::unique_ptr<char_transformer> reference_model;
  if (settings.compare) {
    reference_model = std::make_unique<char_transformer>(options);
    reference_model->to(device, type);
    copy_parameters(model, *reference_model);
  }

  training_result result;
  result.backend = device.is_cuda() ? "graph" : "host";
  result.device = device.is_cuda() ? current_gpu_name() : "cpu";
  result.vocabulary = text.vocabulary();
  result.characters = static_cast<std::int64_t>(text.tokens().size());
  for (const torch::Tensor& parameter : model.parameters()) {
    ++result.tensors;
    result.parameters += parameter.numel();
  }
  train_stepgraph(model, text, settings, device, result);
  if (reference_model) {
    batch_sampler sampler(text, settings.batch, settings.context, settings.seed);
    reference_optimizer optimizer(*reference_model, settings);
    result.reference = training("reference", *reference_model, optimizer, sampler, settings, device)
                           .run(0, [](std::int64_t) {});
  }
  return result;
}

}  // namespace

training_result run_training(const training_settings& settings) {
  try {
    return train_as_asked(settings);
  } catch (const c10::Error& e) {
    // Without the trace of stack frames that what() appends.
    throw error(e.what_without_backtrace());
  }
}

}  // namespace stepgraph::cli
