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
  detail::step_counts counts;
  std::vector<bool> learning_rate_by_hand;
  std::optional<double> loss_scale;
  std::optional<double> max_grad_norm;
};

std::int64_t read_int(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toInt();
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

}  // namespace

void Adam::save(torch::serialize::OutputArchive& archive) const {
  const detail::step_counts counts = engine_->counts(param_groups_, state_);
  torch::optim::serialize<AdamParamState, AdamOptions>(archive, *this);

  torch::serialize::OutputArchive own(archive.compilation_unit());
  own.write("step", c10::IValue(static_cast<std::int64_t>(counts.step)));
  own.write("loss_scale", c10::IValue(engine_->options().loss_scale()));
  own.write("max_grad_norm", c10::IValue(engine_->options().max_grad_norm()));
  const std::vector<bool> by_hand = engine_->learning_rates_by_hand(param_groups_);
  for (std::size_t g = 0; g < counts.groups.size(); ++g) {
    own.write(fmt::format("group_step/{}", g),
              c10::IValue(static_cast<std::int64_t>(counts.groups[g])));
    own.write(fmt::format("learning_rate_by_hand/{}", g), c10::IValue(bool{by_hand[g]}));
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
    loaded.counts.groups.push_back(step);
    // torch's optimizers count by parameter only.
    if (!is_ours) loaded.counts.step = std::max(loaded.counts.step, step);
    loaded.learning_rate_by_hand.push_back(false);
    if (is_ours) {
      c10::IValue by_hand;
      own.read(fmt::format("learning_rate_by_hand/{}", g), by_hand);
      loaded.learning_rate_by_hand.back() = by_hand.toBool();
    }
  }
  if (is_ours) {
    loaded.counts.step = static_cast<std::uint64_t>(read_int(own, "step"));
    c10::IValue value;
    own.read("loss_scale", value);
    loaded.loss_scale = value.toDouble();
    own.read("max_grad_norm", value);
    loaded.max_grad_norm = value.toDouble();
  }
  engine_->check_loadable(param_groups_, loaded.options, loaded.max_grad_norm);

  // Nothing below refuses.
  const at::NoGradGuard no_grad;
  flat = 0;
  for (std::size_t g = 0; g < group_count; ++g) {
    AdamOptions& options = detail::options_of(param_groups_[g], g);
    options = loaded.options[g];
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
  if (loaded.loss_scale) engine_->set_loss_scale(*loaded.loss_scale);
  if (loaded.max_grad_norm) engine_->set_max_grad_norm(*loaded.max_grad_norm);
  engine_->restore(param_groups_, loaded.counts, loaded.learning_rate_by_hand);
  if (engine_->captured()) engine_->deliver(param_groups_);
}

}  // namespace stepgraph::libtorch
