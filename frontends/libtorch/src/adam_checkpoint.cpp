#include <ATen/Functions.h>
#include <fmt/format.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <optional>
#include <utility>

#include "step_engine.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/libtorch/adam.hpp"

// The archive is torch's own layout ("state" by parameter, "param_groups" with options) and beside
// it "stepgraph": what belongs to the step and to groups instead of parameters.

namespace stepgraph::libtorch {
namespace {

/// A checkpoint, read and put in the order of this optimizer's groups and parameters.
struct checkpoint {
  std::vector<AdamOptions> options;
  std::vector<AdamParamState> states;  ///< flat; tensors undefined where nothing was saved
  step_status progress;
  std::vector<detail::held_by_hand> held;
  std::optional<double> max_grad_norm;
  std::optional<double> skip_above_norm;
};

std::int64_t read_int(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toInt();
}

std::uint64_t read_count(torch::serialize::InputArchive& archive, const std::string& key) {
  return static_cast<std::uint64_t>(read_int(archive, key));
}

double read_double(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toDouble();
}

bool read_bool(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toBool();
}

void write_count(torch::serialize::OutputArchive& archive, const std::string& key,
                 std::uint64_t value) {
  archive.write(key, c10::IValue(static_cast<std::int64_t>(value)));
}

std::int64_t read_size(torch::serialize::InputArchive& archive, const std::string& key) {
  torch::Tensor size;
  archive.read(key, size);
  return size.item<std::int64_t>();
}

void check_sizes(const std::string& name, const char* operand, const torch::Tensor& saved,
                 const torch::Tensor& parameter) {
  if (saved.defined() && saved.sizes() != parameter.sizes()) {
    throw usage_error(
        fmt::format("{}: the checkpoint's {} has sizes {}, expected {} as the "
                    "parameter",
                    name, operand, c10::str(saved.sizes()), c10::str(parameter.sizes())));
  }
}

/// Stores `value` into `live`, in place if it exists; an undefined value is zero.
void store(torch::Tensor& live, const torch::Tensor& value, const torch::Tensor& parameter) {
  if (!live.defined()) {
    live = at::zeros_like(parameter, parameter.options().dtype(at::kFloat),
                          at::MemoryFormat::Preserve);
  } else if (!value.defined()) {
    live.zero_();
  }
  if (value.defined()) live.copy_(value);
}

void write_progress(torch::serialize::OutputArchive& archive, const step_status& progress,
                    loss_scale_rule rule) {
  write_count(archive, "step", progress.step);
  write_count(archive, "skipped", progress.skipped);
  write_count(archive, "samples", progress.samples);
  const loss_scale_state& scale = progress.next_loss_scale;
  archive.write("loss_scale", c10::IValue(static_cast<double>(scale.scale)));
  write_count(archive, "loss_scale_rule", static_cast<std::uint64_t>(rule));
  write_count(archive, "growth_tracker", scale.growth_tracker);
  archive.write("hysteresis_left", c10::IValue(std::int64_t{scale.hysteresis_left}));
}

/// All but the groups. `now` is where this optimizer stands.
void read_progress(torch::serialize::InputArchive& archive, const step_status& now,
                   const StepOptions& options, step_status& progress) {
  progress.step = read_count(archive, "step");
  progress.skipped = read_count(archive, "skipped");
  progress.samples = read_count(archive, "samples");
  loss_scale_state& scale = progress.next_loss_scale;
  scale.scale = static_cast<float>(read_double(archive, "loss_scale"));
  const auto rule = static_cast<loss_scale_rule>(read_int(archive, "loss_scale_rule"));
  if (rule == options.scaling().rule) {
    scale.growth_tracker = static_cast<std::uint32_t>(read_int(archive, "growth_tracker"));
    scale.hysteresis_left = static_cast<std::int32_t>(read_int(archive, "hysteresis_left"));
  } else {
    scale.hysteresis_left = static_cast<std::int32_t>(options.scaling().hysteresis);
  }
  // Whoever writes an input owns the scale.
  if (options.loss_scale_input().defined()) scale = now.next_loss_scale;
}

}  // namespace

void Adam::save(torch::serialize::OutputArchive& archive) const {
  const step_status progress = engine_->progress(param_groups_, state_, "save");
  torch::optim::serialize<AdamParamState, AdamOptions>(archive, *this);

  torch::serialize::OutputArchive own(archive.compilation_unit());
  write_progress(own, progress, engine_->options().scaling().rule);
  own.write("max_grad_norm", c10::IValue(engine_->options().max_grad_norm()));
  own.write("skip_above_norm", c10::IValue(engine_->options().skip_above_norm()));
  const std::vector<detail::held_by_hand> held = engine_->held(param_groups_);
  for (std::size_t g = 0; g < progress.groups.size(); ++g) {
    write_count(own, fmt::format("group_step/{}", g), progress.groups[g].step);
    own.write(fmt::format("learning_rate_by_hand/{}", g), c10::IValue(held[g].learning_rate));
    own.write(fmt::format("weight_decay_by_hand/{}", g), c10::IValue(held[g].weight_decay));
  }
  archive.write("stepgraph", own);
}

void Adam::load(torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive state_archive;
  archive.read("state", state_archive);
  detail::param_states saved_states;
  torch::optim::detail::serialize<AdamParamState>(state_archive, saved_states);

  torch::serialize::InputArchive groups_archive;
  archive.read("param_groups", groups_archive);
  const auto group_count = static_cast<std::size_t>(read_size(groups_archive, "param_groups/size"));
  if (group_count != param_groups_.size()) {
    throw usage_error(fmt::format("the checkpoint has {} parameter groups, expected {}",
                                  group_count, param_groups_.size()));
  }

  checkpoint loaded;
  const step_status now = engine_->progress(param_groups_, state_, "load");
  loaded.progress.next_loss_scale = now.next_loss_scale;
  torch::serialize::InputArchive own;
  const bool is_ours = archive.try_read("stepgraph", own);
  std::size_t flat = 0;
  for (std::size_t g = 0; g < group_count; ++g) {
    torch::serialize::InputArchive group_archive;
    groups_archive.read(fmt::format("param_groups/{}", g), group_archive);
    torch::serialize::InputArchive options_archive;
    group_archive.read("options", options_archive);
    AdamOptions options = detail::options_of(param_groups_[g], g);
    options.serialize(options_archive);
    loaded.options.push_back(std::move(options));

    const std::vector<torch::Tensor>& parameters = param_groups_[g].params();
    const auto parameter_count = static_cast<std::size_t>(read_size(group_archive, "params/size"));
    if (parameter_count != parameters.size()) {
      throw usage_error(fmt::format("group {}: the checkpoint has {} parameters, expected {}", g,
                                    parameter_count, parameters.size()));
    }
    std::optional<std::int64_t> group_step;
    if (is_ours) group_step = read_int(own, fmt::format("group_step/{}", g));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      c10::IValue key;
      group_archive.read(fmt::format("params/{}", i), key);
      // The address of the saved parameter, as text: torch's key.
      void* address = reinterpret_cast<void*>(std::stoull(key.toStringRef()));  // NOLINT
      AdamParamState state;
      if (const auto found = saved_states.find(address); found != saved_states.end()) {
        state = static_cast<const AdamParamState&>(*found->second);
      }
      const std::string name = engine_->name_of_parameter(g, i, flat++);
      check_sizes(name, "exp_avg", state.exp_avg(), parameters[i]);
      check_sizes(name, "exp_avg_sq", state.exp_avg_sq(), parameters[i]);
      check_sizes(name, "master", state.master(), parameters[i]);
      if (!group_step) group_step = state.step();
      if (state.step() != *group_step) {
        throw usage_error(fmt::format(
            "{}: the checkpoint has it at step {}, expected {} as the group; a group has one step "
            "count",
            name, state.step(), *group_step));
      }
      loaded.states.push_back(std::move(state));
    }
    const auto step = static_cast<std::uint64_t>(group_step.value_or(0));
    loaded.progress.groups.push_back({.step = step});
    // torch's optimizers count by parameter only.
    if (!is_ours) loaded.progress.step = std::max(loaded.progress.step, step);
    loaded.held.emplace_back();
    if (is_ours) {
      loaded.held.back() = {read_bool(own, fmt::format("learning_rate_by_hand/{}", g)),
                            read_bool(own, fmt::format("weight_decay_by_hand/{}", g))};
    }
  }
  if (is_ours) {
    read_progress(own, now, engine_->options(), loaded.progress);
    loaded.max_grad_norm = read_double(own, "max_grad_norm");
    loaded.skip_above_norm = read_double(own, "skip_above_norm");
  }
  const bool needs_norm =
      loaded.max_grad_norm.value_or(0.0) > 0.0 || loaded.skip_above_norm.value_or(0.0) > 0.0;
  engine_->check_loadable(param_groups_, loaded.options, needs_norm);

  // Nothing below refuses.
  const at::NoGradGuard no_grad;
  flat = 0;
  for (std::size_t g = 0; g < group_count; ++g) {
    AdamOptions& options = detail::options_of(param_groups_[g], g);
    options = loaded.options[g];
    options.set_lr(options.lr());  // the tensor too
    for (const torch::Tensor& parameter : param_groups_[g].params()) {
      const AdamParamState& saved = loaded.states[flat++];
      AdamParamState* live = detail::find_state(state_, parameter);
      if (live == nullptr) {
        if (!saved.exp_avg().defined()) continue;  // it will start afresh
        auto& entry = state_[parameter.unsafeGetTensorImpl()];
        entry = std::make_unique<AdamParamState>();
        live = static_cast<AdamParamState*>(entry.get());
      }
      live->step(saved.step());
      store(live->exp_avg(), saved.exp_avg(), parameter);
      store(live->exp_avg_sq(), saved.exp_avg_sq(), parameter);
      const bool wants_master = options.master_weights() && parameter.scalar_type() != at::kFloat;
      if (wants_master && (saved.master().defined() || live->master().defined())) {
        store(live->master(), saved.master().defined() ? saved.master() : parameter, parameter);
      }
    }
  }
  if (loaded.max_grad_norm) engine_->set_max_grad_norm(*loaded.max_grad_norm);
  if (loaded.skip_above_norm) engine_->set_skip_above_norm(*loaded.skip_above_norm);
  engine_->restore(param_groups_, loaded.progress, loaded.held);
  if (engine_->captured()) engine_->deliver(param_groups_);
}

}  // namespace stepgraph::libtorch
