#include "train_report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include "schedule_text.hpp"
#include "setting_names.hpp"

namespace stepgraph::cli {
namespace {

/// JSON has no infinity: null stands for a norm that is not finite.
nlohmann::ordered_json numbers(const std::vector<double>& values) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const double value : values) {
    list.push_back(std::isfinite(value) ? nlohmann::ordered_json(value) : nullptr);
  }
  return list;
}

double max_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

}  // namespace

std::string json_of(const training_settings& settings, const training_result& result) {
  using json = nlohmann::ordered_json;
  const training_record& ours = result.stepgraph;
  const training_record* reference = result.reference ? &*result.reference : nullptr;
  const auto when_compared = [&](auto value) { return reference ? json(value()) : json(nullptr); };
  const json result_json = {
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
      {"learning_rates", ours.learning_rates},
      {"dtype", name_of(settings.type)},
      {"loss_scaling", name_of(settings.scaling.rule)},
      {"schedule", describe(settings.learning_rate)},
      {"first_step", result.first_step},
      {"weight_decays", ours.weight_decays},
      {"grad_norms", numbers(ours.grad_norms)},
      {"loss_scales", ours.loss_scales},
      {"final_loss_scale", ours.final_loss_scale},
      {"skipped_steps", ours.skipped_steps},
      {"reference_skipped_steps", when_compared([&] { return reference->skipped_steps; })},
      {"parameters_digest", ours.parameters_digest},
      {"state_digest", ours.state_digest},
      {"checkpoint", settings.save_path.empty() ? json(nullptr) : json(settings.save_path)}};
  return result_json.dump(2) + "\n";
}

std::string text_of(const training_settings& settings, const training_result& result) {
  const training_record& ours = result.stepgraph;
  std::string text = fmt::format(
      "{} steps on {} by the {} executor: {} parameters in {} tensors, {} characters of {}\n"
      "  stepgraph            loss {:.4f} -> {:.4f}  optimizer step {:.1f} us{}\n",
      ours.losses.size(), result.device, result.backend, result.parameters, result.tensors,
      result.characters, settings.text, ours.losses.front(), ours.losses.back(),
      ours.optimizer_step_us,
      ours.launch_us ? fmt::format(", launch {:.1f} us", *ours.launch_us) : "");
  if (settings.scales_loss() || !ours.skipped_steps.empty()) {
    text += fmt::format("  {} steps skipped, loss scale {:g} -> {:g}\n", ours.skipped_steps.size(),
                        ours.loss_scales.front(), ours.final_loss_scale);
  }
  if (!settings.save_path.empty()) text += fmt::format("  checkpoint in {}\n", settings.save_path);
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

}  // namespace stepgraph::cli
