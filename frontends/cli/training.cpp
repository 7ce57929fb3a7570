#include "training.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>

#include "char_transformer.hpp"
#include "progress_line.hpp"
#include "step_timer.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/libtorch/adam.hpp"
#include "text_data.hpp"
#include "torch_backend.hpp"

namespace stepgraph::cli {
namespace {

/// What a training needs of its optimizer.
class step_optimizer {
 public:
  virtual ~step_optimizer() = default;

  /// Called outside of the measured time when `completed` steps are done.
  virtual void prepare(std::int64_t completed) = 0;
  /// Clips, updates and zeroes the gradients.
  virtual void step() = 0;
  /// Of the step just made.
  virtual double learning_rate() = 0;
};

/// Matrices decay; biases and the scales of the norms do not.
struct parameter_groups {
  std::vector<torch::Tensor> matrices;
  std::vector<torch::Tensor> vectors;
  std::vector<std::string> names;  ///< of the matrices, then of the vectors

  explicit parameter_groups(const char_transformer& model) {
    std::vector<std::string> vector_names;
    for (const auto& parameter : model.named_parameters()) {
      const bool is_matrix = parameter.value().dim() >= 2;
      (is_matrix ? matrices : vectors).push_back(parameter.value());
      (is_matrix ? names : vector_names).push_back(parameter.key());
    }
    names.insert(names.end(), vector_names.begin(), vector_names.end());
  }

  /// As torch wants them; `options` makes the options of a group from its weight decay.
  template <class Options>
  std::vector<torch::optim::OptimizerParamGroup> with(double weight_decay, Options options) const {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(matrices, options(weight_decay));
    groups.emplace_back(vectors, options(0.0));
    return groups;
  }
};

/// Clipping, schedule, update and zeroing in one step of stepgraph.
class stepgraph_optimizer final : public step_optimizer {
 public:
  stepgraph_optimizer(const char_transformer& model, const training_settings& settings)
      : stepgraph_optimizer(parameter_groups(model), settings) {}

  void prepare(std::int64_t) override { optimizer_.prepare(); }
  void step() override { optimizer_.step(); }
  double learning_rate() override { return optimizer_.status().groups.front().learning_rate; }

 private:
  stepgraph_optimizer(const parameter_groups& groups, const training_settings& settings)
      : optimizer_(groups.with(settings.weight_decay,
                               [&](double weight_decay) {
                                 return std::make_unique<libtorch::AdamOptions>(
                                     libtorch::AdamOptions()
                                         .schedule(settings.schedule)
                                         .betas({settings.beta1, settings.beta2})
                                         .eps(settings.eps)
                                         .weight_decay(weight_decay));
                               }),
                   {},
                   libtorch::StepOptions()
                       .max_grad_norm(settings.max_grad_norm)
                       .zero_gradients(true)
                       .names(groups.names)) {}

  libtorch::Adam optimizer_;
};

/// torch's own optimizer, with the learning rate computed on the host.
class reference_optimizer final : public step_optimizer {
 public:
  reference_optimizer(const char_transformer& model, const training_settings& settings)
      : settings_(settings), parameters_(model.parameters()) {
    optimizer_ = std::make_unique<torch::optim::AdamW>(
        parameter_groups(model).with(settings.weight_decay, [&](double weight_decay) {
          return std::make_unique<torch::optim::AdamWOptions>(
              torch::optim::AdamWOptions()
                  .betas({settings.beta1, settings.beta2})
                  .eps(settings.eps)
                  .weight_decay(weight_decay));
        }));
  }

  void prepare(std::int64_t completed) override {
    learning_rate_ =
        math::learning_rate_at(settings_.schedule, static_cast<std::uint64_t>(completed));
    for (torch::optim::OptimizerParamGroup& group : optimizer_->param_groups()) {
      static_cast<torch::optim::AdamWOptions&>(group.options()).lr(learning_rate_);
    }
  }

  void step() override {
    if (settings_.max_grad_norm > 0.0) {
      torch::nn::utils::clip_grad_norm_(parameters_, settings_.max_grad_norm);
    }
    optimizer_->step();
    optimizer_->zero_grad();
  }

  double learning_rate() override { return learning_rate_; }

 private:
  const training_settings& settings_;
  std::vector<torch::Tensor> parameters_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  double learning_rate_ = 0.0;
};

torch::Tensor to_tensor(std::vector<std::int64_t>& tokens, const training_settings& settings,
                        torch::Device device) {
  // The clone outlives the vector.
  return torch::from_blob(tokens.data(), {settings.batch, settings.context}, torch::kInt64)
      .clone()
      .to(device);
}

training_record train(const std::string& label, char_transformer& model, step_optimizer& optimizer,
                      const text_data& text, const training_settings& settings,
                      torch::Device device) {
  batch_sampler sampler(text, settings.batch, settings.context, settings.seed);
  step_timer timer(device.is_cuda());
  progress_line progress(label, settings.steps);
  training_record record;
  for (std::int64_t step = 0; step < settings.steps; ++step) {
    token_batch batch = sampler.next();
    const torch::Tensor logits = model.forward(to_tensor(batch.inputs, settings, device));
    const torch::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), to_tensor(batch.targets, settings, device).flatten());
    loss.backward();
    const double loss_value = loss.item<double>();
    if (!std::isfinite(loss_value)) {
      throw error(fmt::format("{}: the loss of step {} is not finite; try a smaller --lr", label,
                              step + 1));
    }

    optimizer.prepare(step);
    timer.start();
    optimizer.step();
    const double step_us = timer.stop();

    record.losses.push_back(loss_value);
    record.learning_rates.push_back(optimizer.learning_rate());
    progress.update(step + 1, fmt::format("loss {:.4f}  lr {:.2e}  optimizer {:.0f} us", loss_value,
                                          record.learning_rates.back(), step_us));
  }
  record.optimizer_step_us = timer.median_step_us();
  record.launch_us = timer.median_launch_us();
  return record;
}

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

training_result train_as_asked(const training_settings& settings) {
  // Respect what the user set for every OpenMP program.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    torch::set_num_threads(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  }
  const text_data text = text_data::from_file(settings.text);
  // Refuses a short text before anything is built.
  batch_sampler(text, settings.batch, settings.context, settings.seed);
  const torch::Device device = choose_device(settings.device);

  const char_transformer_options options{.vocabulary = text.vocabulary(),
                                         .context = settings.context,
                                         .layers = settings.layers,
                                         .heads = settings.heads,
                                         .width = settings.width};
  torch::manual_seed(settings.seed);
  char_transformer model(options);
  model.to(device);
  std::unique_ptr<char_transformer> reference_model;
  if (settings.compare) {
    reference_model = std::make_unique<char_transformer>(options);
    reference_model->to(device);
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
  {
    stepgraph_optimizer optimizer(model, settings);
    result.stepgraph = train("stepgraph", model, optimizer, text, settings, device);
  }
  if (reference_model) {
    reference_optimizer optimizer(*reference_model, settings);
    result.reference = train("reference", *reference_model, optimizer, text, settings, device);
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
