#include "schedule_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <string_view>
#include <utility>

#include "command.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/megatron_schedules.hpp"
#include "stepgraph/torch_schedules.hpp"

namespace stepgraph::cli {
namespace {

constexpr std::string_view table_prefix = "table:";

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = {
      "constant",  "linear",      "cosine",     "inverse-square-root", "wsd",      "step",
      "multistep", "exponential", "polynomial", "cosine-restarts",     "one-cycle"};
  return names;
}

bool is_table(const std::string& name) { return name.starts_with(table_prefix); }

/// Accepts the names and table:FILE.
std::string check_schedule(const std::string& text, const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), text) != names.end()) return "";
  if (is_table(text) && text.size() > table_prefix.size()) return "";
  return fmt::format("'{}' is not one of {}, table:FILE", text, fmt::join(names, ", "));
}

/// An option and the schedules that use it.
struct option_use {
  const char* option;
  std::vector<std::string_view> schedules;
};

const std::vector<option_use>& option_uses() {
  static const std::vector<option_use> uses = {
      {"--decay-steps",
       {"linear", "cosine", "inverse-square-root", "wsd", "polynomial", "one-cycle"}},
      {"--wsd-decay-steps", {"wsd"}},
      {"--wsd-style", {"wsd"}},
      {"--step-size", {"step"}},
      {"--gamma", {"step", "multistep", "exponential"}},
      {"--milestones", {"multistep"}},
      {"--power", {"polynomial"}},
      {"--restart-period", {"cosine-restarts"}},
      {"--restart-factor", {"cosine-restarts"}},
      {"--rising-share", {"one-cycle"}},
      {"--div-factor", {"one-cycle"}},
      {"--final-div-factor", {"one-cycle"}},
      {"--three-phase", {"one-cycle"}}};
  return uses;
}

void refuse_unused_options(const schedule_options& options) {
  if (options.command == nullptr) return;
  for (const option_use& use : option_uses()) {
    if (options.command->count(use.option) == 0) continue;
    if (std::find(use.schedules.begin(), use.schedules.end(), options.name) ==
        use.schedules.end()) {
      throw CLI::ValidationError(use.option,
                                 fmt::format("is not used by --schedule {}", options.name));
    }
  }
}

std::vector<double> read_table(const std::string& name) {
  const std::string path = name.substr(table_prefix.size());
  std::ifstream file(path);
  if (!file) throw error(fmt::format("cannot read the table '{}'", path));
  std::vector<double> values;
  for (std::string word; file >> word;) {
    double value = 0.0;
    if (!CLI::detail::lexical_cast(word, value)) {
      throw error(fmt::format("the table '{}': '{}' is not a number (entry {})", path, word,
                              values.size() + 1));
    }
    values.push_back(value);
  }
  if (values.empty()) throw error(fmt::format("the table '{}' is empty", path));
  return values;
}

std::uint64_t count(std::int64_t value) { return static_cast<std::uint64_t>(value); }

/// Makes a schedule of the core; what it refuses is wrong usage of `option`.
template <class Make>
schedule checked(const char* option, Make&& make) {
  try {
    return make();
  } catch (const usage_error& refused) {
    throw CLI::ValidationError(option, refused.what());
  }
}

schedule megatron_style(const schedule_options& options, std::int64_t steps) {
  using style = schedules::megatron_learning_rate_style;
  using wsd = schedules::megatron_wsd_style;
  const std::int64_t warmup = options.warmup.value_or(steps / 10);
  const double maximum = options.learning_rate;
  schedules::megatron_learning_rate_options core;
  core.style = options.name == "constant"              ? style::constant
               : options.name == "linear"              ? style::linear
               : options.name == "inverse-square-root" ? style::inverse_square_root
               : options.name == "wsd"                 ? style::wsd
                                                       : style::cosine;
  // A warm-up of w steps is the line through lr / (w + 1) in the first step and lr after it.
  core.initial = maximum / static_cast<double>(warmup + 1);
  core.maximum = maximum;
  core.minimum = options.minimum.value_or(maximum / 10.0);
  core.warmup = count(warmup);
  // The clock shows 0 in the first step.
  const std::int64_t decay = std::max(options.decay_steps.value_or(steps) - 1, warmup + 1);
  core.decay = count(decay);
  core.wsd_decay = count(options.wsd_decay_steps.value_or(std::max<std::int64_t>(1, decay / 5)));
  const std::string wsd_style = options.wsd_style.value_or("exponential");
  core.wsd_style = wsd_style == "linear"       ? wsd::linear
                   : wsd_style == "cosine"     ? wsd::cosine
                   : wsd_style == "minus-sqrt" ? wsd::minus_sqrt
                                               : wsd::exponential;
  core.clock = schedule_clock::updates;
  return schedules::megatron_learning_rate(core);
}

schedule torch_style(const schedule_options& options, std::int64_t steps) {
  const double rate = options.learning_rate;
  const double minimum = options.minimum.value_or(rate / 10.0);
  const std::uint64_t decay = count(options.decay_steps.value_or(steps));
  const auto share_of_steps = [&](std::int64_t parts) {
    return std::max<std::int64_t>(1, steps / parts);
  };
  if (options.name == "step") {
    return schedules::step_lr({.learning_rate = rate,
                               .step_size = count(options.step_size.value_or(share_of_steps(3))),
                               .gamma = options.gamma.value_or(0.1)});
  }
  if (options.name == "multistep") {
    std::vector<std::uint64_t> milestones(options.milestones.begin(), options.milestones.end());
    if (milestones.empty()) throw CLI::RequiredError("--schedule multistep: --milestones");
    return schedules::multi_step_lr({.learning_rate = rate,
                                     .milestones = std::move(milestones),
                                     .gamma = options.gamma.value_or(0.1)});
  }
  if (options.name == "exponential") {
    return schedules::exponential_lr(
        {.learning_rate = rate, .gamma = options.gamma.value_or(0.99)});
  }
  if (options.name == "polynomial") {
    return schedules::polynomial_lr(
        {.learning_rate = rate, .total_iters = decay, .power = options.power.value_or(1.0)});
  }
  if (options.name == "cosine-restarts") {
    return schedules::cosine_annealing_warm_restarts(
        {.learning_rate = rate,
         .t_0 = count(options.restart_period.value_or(share_of_steps(4))),
         .t_mult = count(options.restart_factor.value_or(1)),
         .eta_min = minimum});
  }
  return schedules::one_cycle_lr({.max_lr = rate,
                                  .total_steps = decay,
                                  .pct_start = options.rising_share.value_or(0.3),
                                  .div_factor = options.div_factor.value_or(25.0),
                                  .final_div_factor = options.final_div_factor.value_or(1e4),
                                  .three_phase = options.three_phase});
}

bool is_torch_style(const std::string& name) {
  return name == "step" || name == "multistep" || name == "exponential" || name == "polynomial" ||
         name == "cosine-restarts" || name == "one-cycle";
}

/// The schedule after a linear warm-up, its clock starting when that is over.
schedule after_warmup(schedule main, double rate, std::int64_t warmup) {
  if (warmup == 0) return main;
  const schedule rise = schedules::linear_lr({.learning_rate = rate,
                                              .start_factor = 1.0 / static_cast<double>(warmup + 1),
                                              .end_factor = 1.0,
                                              .total_iters = count(warmup)});
  return schedules::sequence({rise, std::move(main)}, {count(warmup)});
}

CLI::Option* add_count(CLI::App& command, const char* name, std::optional<std::int64_t>& value,
                       const char* what) {
  return command.add_option(name, value, what)
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->default_str("")
      ->group("Schedules");
}

CLI::Option* add_number(CLI::App& command, const char* name, std::optional<double>& value,
                        const char* what) {
  return command.add_option(name, value, what)
      ->check(check_not_negative)
      ->default_str("")
      ->group("Schedules");
}

}  // namespace

void add_schedule_options(CLI::App& command, schedule_options& options) {
  options.command = &command;
  const auto group = [](CLI::Option* option) { return option->group("Schedules"); };
  group(command.add_option("--lr", options.learning_rate, "Largest learning rate"))
      ->check(check_positive);
  group(
      command.add_option("--schedule", options.name,
                         "Learning rate: " + fmt::format("{}", fmt::join(schedule_names(), ", ")) +
                             ", or table:FILE with one number a step"))
      ->check([](const std::string& text) { return check_schedule(text, schedule_names()); });
  group(command.add_option("--warmup", options.warmup,
                           "Steps of linear warm-up; default: a tenth of the steps, 0 for the "
                           "schedules of torch (from step on in the list)"))
      ->check(CLI::Range(0, 100000000))
      ->default_str("");
  add_number(command, "--min-lr", options.minimum,
             "Lowest learning rate of linear, cosine, inverse-square-root, wsd and "
             "cosine-restarts; default: a tenth of --lr");
  add_count(command, "--decay-steps", options.decay_steps,
            "Steps after which the learning rate has fallen; default: all");
  add_count(command, "--wsd-decay-steps", options.wsd_decay_steps,
            "The falling last part of wsd; default: a fifth");
  group(command.add_option("--wsd-style", options.wsd_style, "How wsd falls; default: exponential"))
      ->check(CLI::IsMember({"linear", "cosine", "exponential", "minus-sqrt"}))
      ->default_str("");
  add_count(command, "--step-size", options.step_size,
            "Steps between two falls of step; default: a third");
  add_number(command, "--gamma", options.gamma,
             "Factor of step and multistep (default 0.1) and of exponential (default 0.99)");
  group(command.add_option("--milestones", options.milestones, "Steps at which multistep falls"))
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(CLI::NonNegativeNumber)
      ->default_str("");
  add_number(command, "--power", options.power, "Of polynomial; default: 1");
  add_count(command, "--restart-period", options.restart_period,
            "First period of cosine-restarts; default: a quarter");
  add_count(command, "--restart-factor", options.restart_factor,
            "Each later period is so many times as long; default: 1");
  add_number(command, "--rising-share", options.rising_share,
             "Share of the steps in which one-cycle rises; default: 0.3");
  add_number(command, "--div-factor", options.div_factor,
             "One-cycle starts at --lr over this; default: 25");
  add_number(command, "--final-div-factor", options.final_div_factor,
             "And ends at its start over this; default: 10000");
  group(command.add_flag("--three-phase", options.three_phase,
                         "One-cycle falls to where it began before it falls further"));

  group(command.add_option("--weight-decay", options.weight_decay,
                           "Decoupled weight decay of matrices; vectors do not decay"))
      ->check(check_not_negative);
  group(command.add_option("--weight-decay-schedule", options.weight_decay_name,
                           "Weight decay: constant, linear, cosine, or table:FILE"))
      ->check([](const std::string& text) {
        return check_schedule(text, {"constant", "linear", "cosine"});
      });
  add_number(command, "--weight-decay-end", options.weight_decay_end,
             "Last weight decay of linear and cosine");
  add_count(command, "--weight-decay-steps", options.weight_decay_steps,
            "Steps in which the weight decay gets there; default: all");
}

schedule learning_rate_of(const schedule_options& options, std::int64_t steps) {
  refuse_unused_options(options);
  if (options.minimum.value_or(0.0) > options.learning_rate) {
    throw CLI::ValidationError("--min-lr", "is larger than --lr");
  }
  const std::int64_t warmup = options.warmup.value_or(0);
  // A training that stops early may stop within its warm-up.
  const std::int64_t planned = std::max(steps, options.decay_steps.value_or(steps));
  if (warmup >= planned) {
    throw CLI::ValidationError("--warmup",
                               fmt::format("{} leaves none of {} steps", warmup, planned));
  }
  if (warmup > 0 && (is_table(options.name) || options.name == "one-cycle")) {
    throw CLI::ValidationError("--warmup",
                               fmt::format("is not used by --schedule {}",
                                           is_table(options.name) ? "table:FILE" : options.name));
  }
  return checked("--schedule", [&] {
    if (is_table(options.name)) return schedules::table(read_table(options.name));
    if (!is_torch_style(options.name)) return megatron_style(options, steps);
    return after_warmup(torch_style(options, steps), options.learning_rate, warmup);
  });
}

std::optional<schedule> weight_decay_of(const schedule_options& options, std::int64_t steps) {
  const std::string& name = options.weight_decay_name;
  const bool rises = name == "linear" || name == "cosine";
  for (const auto& [option, given] :
       {std::pair("--weight-decay-end", options.weight_decay_end.has_value()),
        std::pair("--weight-decay-steps", options.weight_decay_steps.has_value())}) {
    if (given && !rises) {
      throw CLI::ValidationError(option,
                                 fmt::format("is not used by --weight-decay-schedule {}", name));
    }
  }
  if (name == "constant") return std::nullopt;
  if (rises && !options.weight_decay_end) {
    throw CLI::RequiredError(fmt::format("--weight-decay-schedule {}: --weight-decay-end", name));
  }
  return checked("--weight-decay-schedule", [&] {
    if (is_table(name)) return schedules::table(read_table(name));
    schedules::megatron_weight_decay_options core;
    core.style = name == "linear" ? schedules::megatron_weight_decay_style::linear
                                  : schedules::megatron_weight_decay_style::cosine;
    core.start = options.weight_decay;
    core.end = *options.weight_decay_end;
    core.increment =
        count(std::max<std::int64_t>(1, options.weight_decay_steps.value_or(steps) - 1));
    core.clock = schedule_clock::updates;
    return schedules::megatron_weight_decay(core);
  });
}

}  // namespace stepgraph::cli
