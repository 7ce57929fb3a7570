#include "training_checkpoint.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <system_error>

#include "digest.hpp"
#include "schedule_text.hpp"
#include "setting_names.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::cli {
namespace {

constexpr std::int64_t layout_version = 1;

std::string text_of(const schedule& described) {
  return fmt::format("{}", fmt::join(describe(described), "; "));
}

std::string key_of_parameter(std::size_t index) { return fmt::format("parameters/{}", index); }
std::string key_of_option(std::size_t index, const char* part) {
  return fmt::format("run/{}/{}", index, part);
}

std::string read_string(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toStringRef();
}

std::int64_t read_int(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toInt();
}

void check_description(torch::serialize::InputArchive& archive, const std::string& path,
                       const run_description& description) {
  const auto count = static_cast<std::size_t>(read_int(archive, "run/size"));
  for (std::size_t i = 0; i < description.size(); ++i) {
    const auto& [option, value] = description[i];
    const std::string saved_option =
        i < count ? read_string(archive, key_of_option(i, "option")) : "nothing";
    const std::string saved =
        i < count ? read_string(archive, key_of_option(i, "value")) : "nothing";
    if (saved_option == option && saved == value) continue;
    throw error(fmt::format("--resume: '{}' was written by a training with {} {}, expected {}",
                            path, option, saved, value));
  }
}

}  // namespace

run_description describe_run(const training_settings& settings, const text_data& text) {
  digest tokens;
  tokens.add(text.tokens().data(), text.tokens().size() * sizeof(text.tokens().front()));
  const loss_scaling& scaling = settings.scaling;
  const auto number = [](auto value) { return fmt::format("{}", value); };
  return {
      {"--text (digest)", tokens.text()},
      {"--batch", number(settings.batch)},
      {"--context", number(settings.context)},
      {"--layers", number(settings.layers)},
      {"--heads", number(settings.heads)},
      {"--width", number(settings.width)},
      {"--dtype", name_of(settings.type)},
      {"--seed", number(settings.seed)},
      {"--schedule", text_of(settings.learning_rate)},
      {"--weight-decay", number(settings.weight_decay)},
      {"--weight-decay-schedule", settings.weight_decay_schedule
                                      ? text_of(*settings.weight_decay_schedule)
                                      : std::string("constant")},
      {"--beta1", number(settings.beta1)},
      {"--beta2", number(settings.beta2)},
      {"--eps", number(settings.eps)},
      {"--clip", number(settings.max_grad_norm)},
      {"--skip-above-norm", number(settings.skip_above_norm)},
      {"--loss-scaling", name_of(scaling.rule)},
      {"--loss-scale", number(settings.loss_scale)},
      {"--growth-interval", number(scaling.growth_interval)},
  };
}

void save_checkpoint(const std::string& path, const training_state& state, std::int64_t steps_done,
                     const run_description& description) {
  torch::serialize::OutputArchive archive;
  archive.write("layout", c10::IValue(layout_version));
  archive.write("steps", c10::IValue(steps_done));
  archive.write("sampler", c10::IValue(state.sampler.position()));
  archive.write("run/size", c10::IValue(static_cast<std::int64_t>(description.size())));
  for (std::size_t i = 0; i < description.size(); ++i) {
    archive.write(key_of_option(i, "option"), c10::IValue(description[i].first));
    archive.write(key_of_option(i, "value"), c10::IValue(description[i].second));
  }
  const std::vector<torch::Tensor> parameters = state.model.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    archive.write(key_of_parameter(i), parameters[i].detach(), /*is_buffer=*/true);
  }
  torch::serialize::OutputArchive optimizer(archive.compilation_unit());
  state.optimizer.save(optimizer);
  archive.write("optimizer", optimizer);

  const std::string partial = path + ".partial";
  std::error_code failure;
  try {
    archive.save_to(partial);
    std::filesystem::rename(partial, path, failure);
  } catch (const c10::Error& e) {
    throw error(fmt::format("cannot write '{}': {}", partial, e.what_without_backtrace()));
  }
  if (failure) throw error(fmt::format("cannot write '{}': {}", path, failure.message()));
}

std::int64_t load_checkpoint(const std::string& path, const training_state& state,
                             const run_description& description) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {
    throw error(fmt::format("--resume: there is no file '{}'", path));
  }
  torch::serialize::InputArchive archive;
  c10::IValue layout;
  try {
    archive.load_from(path, torch::kCPU);
    if (!archive.try_read("layout", layout) || layout.toInt() != layout_version) {
      throw error(fmt::format("--resume: '{}' is not a checkpoint of this program", path));
    }
  } catch (const c10::Error&) {
    throw error(fmt::format("--resume: '{}' is not a checkpoint of this program", path));
  }
  check_description(archive, path, description);

  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> parameters = state.model.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    torch::Tensor saved;
    archive.read(key_of_parameter(i), saved, /*is_buffer=*/true);
    parameters[i].copy_(saved);
  }
  torch::serialize::InputArchive optimizer;
  archive.read("optimizer", optimizer);
  state.optimizer.load(optimizer);
  state.sampler.restore(read_string(archive, "sampler"));
  return read_int(archive, "steps");
}

}  // namespace stepgraph::cli
