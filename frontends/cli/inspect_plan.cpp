#include "inspect_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "command.hpp"
#include "parameter_lists.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/step_builder.hpp"

namespace stepgraph::cli {
namespace {

constexpr std::array formats = {storage_format::none, storage_format::f32, storage_format::f16,
                                storage_format::bf16, storage_format::remainder};

/// The format of a name that was checked when it was parsed.
storage_format format_named(const std::string& name) {
  return *std::find_if(formats.begin(), formats.end(),
                       [&](storage_format format) { return name_of(format) == name; });
}

tensor_view shape_of(std::uint64_t numel, storage_format format) {
  return {.data = nullptr,
          .numel = numel,
          .format = format,
          .device = {.kind = device_kind::cuda, .index = 0}};
}

tensor_operands operands_of(const parameter_shape& parameter, const inspect_settings& settings) {
  const auto operand = [&](const std::string& format) {
    return shape_of(parameter.numel(), format_named(format));
  };
  tensor_operands operands{.name = parameter.name,
                           .parameter = operand(settings.parameter_format),
                           .gradient = operand(settings.gradient_format),
                           .master = {},
                           .exp_avg = operand(settings.moment_format),
                           .exp_avg_sq = operand(settings.moment_format)};
  if (settings.master != "none") operands.master = operand(settings.master);
  return operands;
}

/// "NAME=before:NODE" and its like, checked when it was parsed but for the name of the node.
foreign_node foreign_of(const std::string& text) {
  const std::size_t equals = text.find('=');
  const std::size_t colon = text.find(':', equals);
  const std::string when = text.substr(equals + 1, colon - equals - 1);
  return {.name = text.substr(0, equals),
          .when = when == "before" ? foreign_order::before : foreign_order::after,
          .node = text.substr(colon + 1),
          .only_if_applied = when == "applied"};
}

std::string check_foreign(const std::string& text) {
  const std::size_t equals = text.find('=');
  const std::string place = equals == std::string::npos ? "" : text.substr(equals + 1);
  for (const char* when : {"before:", "after:", "applied:"}) {
    if (place.starts_with(when)) return "";
  }
  return fmt::format("'{}' is not NAME=before:NODE, NAME=after:NODE or NAME=applied:NODE", text);
}

step_options options_of(const inspect_settings& settings) {
  step_options options = settings.options;
  options.norm = settings.norm == "infinity" ? norm_kind::infinity : norm_kind::l2;
  options.scaling = scaling_of(settings.loss_scale, "none");
  options.loss_scale = first_loss_scale(settings.loss_scale, options.scaling);
  return options;
}

}  // namespace

void add_plan_options(CLI::App& command, inspect_settings& settings) {
  const CLI::IsMember format_names({"f32", "f16", "bf16"});
  command.add_option("--parameters", settings.parameters, "Parameter list")
      ->check(CLI::IsMember(parameter_list_names()));
  command.add_option("--tensors", settings.tensors, "Length of the list nx4096")
      ->check(CLI::Range(1, 1000000));
  command.add_option("--parameter-format", settings.parameter_format, "Storage of the parameters")
      ->check(format_names);
  command.add_option("--gradient-format", settings.gradient_format, "Storage of the gradients")
      ->check(format_names);
  command.add_option("--moment-format", settings.moment_format, "Storage of both moments")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command.add_option("--master", settings.master, "Master copy of the parameters")
      ->check(CLI::IsMember({"none", "f32", "remainder"}));
  command
      .add_option("--extra-gradients", settings.extra_gradients,
                  "Elements of a gradient without a parameter, which counts for the norm")
      ->check(CLI::Range(std::uint64_t{0}, std::uint64_t{1} << 40));

  command
      .add_option(
          "--foreign", settings.foreign,
          "Work of the caller's, as NAME=before:NODE, NAME=after:NODE, or NAME=applied:NODE "
          "for work after NODE that a skipped step leaves out; may be repeated")
      ->type_name("WORK")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->default_str("")
      ->check(check_foreign);

  step_options& options = settings.options;
  add_norm_options(command, options.max_grad_norm, options.skip_above_norm);
  command.add_option("--norm", settings.norm, "Norm of the gradient")
      ->check(CLI::IsMember({"l2", "infinity"}));
  command.add_flag("--separate-norms", settings.separate_norms,
                   "Matrices and vectors have norms of their own beside the global one");
  command.add_flag("--measure-norm", options.measure_norm,
                   "Measure the norm even if nothing depends on it");
  command.add_flag("--count-zeros", options.count_zeros, "Count the zeros of the gradient");
  command.add_flag("--skip-non-finite", options.skip_non_finite,
                   "Leave everything untouched when a gradient is not finite");
  command.add_flag("--exchange-totals", options.exchange_totals,
                   "Leave the sums of the gradient to work between devices");
  add_loss_scale_options(command, settings.loss_scale);
  command.add_flag("--zero-gradients", options.zero_gradients, "Zero the gradients in the update");
  command.add_flag("--unscale-gradients", options.unscale_gradients,
                   "Leave the gradients unscaled and clipped");
  command.add_flag("--stochastic-rounding", options.stochastic_rounding,
                   "Round bf16 parameters without master at random");
  command
      .add_option("--records", options.record_capacity, "Step records kept; 0: none are written")
      ->check(CLI::Range(0, 1000000));
  command
      .add_option("--samples-per-step", options.samples_per_step,
                  "What an applied step adds to the samples")
      ->check(CLI::Range(std::uint64_t{0}, std::uint64_t{1} << 40));
  command.add_option("--steps", settings.steps, "Steps that the schedules are made for")
      ->check(CLI::Range(1, 100000000));
  settings.schedules.weight_decay = 0.1;
  add_schedule_options(command, settings.schedules);
  command
      .add_option("--bandwidth", settings.bandwidth,
                  "Memory bandwidth in GB/s for the predicted times; the default is an H200's")
      ->check(check_positive);
  command.add_option("--json", settings.json_path, "Write the plan as JSON; '-': standard output")
      ->type_name("FILE");
  command
      .add_option("--dot", settings.dot_path, "Write the plan for Graphviz; '-': standard output")
      ->type_name("FILE");
}

step_plan plan_of(const inspect_settings& settings) {
  const schedule_options& asked = settings.schedules;
  group_options matrices = {
      .name = "matrices", .learning_rate = asked.learning_rate, .weight_decay = asked.weight_decay};
  if (!asked.name.empty()) {
    matrices.learning_rate_schedule = learning_rate_of(asked, settings.steps);
  }
  group_options vectors = matrices;
  vectors.name = "vectors";
  vectors.weight_decay = 0.0;
  matrices.weight_decay_schedule = weight_decay_of(asked, settings.steps);
  if (settings.separate_norms) {
    matrices.norm_group = matrices.name;
    vectors.norm_group = vectors.name;
  }

  try {
    step_builder builder(plan_purpose::inspect);
    const group_id decay = builder.add_group(std::move(matrices));
    const group_id no_decay = builder.add_group(std::move(vectors));
    for (const parameter_shape& parameter : parameter_list(settings.parameters, settings.tensors)) {
      builder.add_tensor(parameter.shape.size() > 1 ? decay : no_decay,
                         operands_of(parameter, settings));
    }
    if (settings.extra_gradients > 0) {
      builder.add_gradient(
          no_decay, "extra gradient",
          shape_of(settings.extra_gradients, format_named(settings.gradient_format)));
    }
    builder.set_options(options_of(settings));
    for (const std::string& work : settings.foreign) builder.add_foreign_work(foreign_of(work));
    return builder.build();
  } catch (const usage_error& refused) {
    throw CLI::ValidationError("plan", refused.what());
  }
}

}  // namespace stepgraph::cli
