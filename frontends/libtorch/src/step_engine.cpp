#include "step_engine.hpp"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "stepgraph/error.hpp"
#include "stepgraph/step_builder.hpp"

namespace stepgraph::libtorch::detail {
namespace {

/// Work that a capture underway must not record, with a stream of its own if there is one.
class build_scope {
 public:
  explicit build_scope(const std::optional<c10::Device>& device) {
    if (!device || !device->is_cuda()) return;
#if defined(STEPGRAPH_LIBTORCH_CUDA)
    guard_.reset_device(*device);
    if (current_stream_is_capturing(*device)) outside_.emplace(*device);
#endif
  }

  bool capturing() const noexcept {
#if defined(STEPGRAPH_LIBTORCH_CUDA)
    return outside_.has_value();
#else
    return false;
#endif
  }

  void finish() {
#if defined(STEPGRAPH_LIBTORCH_CUDA)
    if (outside_) outside_->finish();
#endif
  }

 private:
  c10::OptionalDeviceGuard guard_;
#if defined(STEPGRAPH_LIBTORCH_CUDA)
  std::optional<outside_capture> outside_;
#endif
};

std::unique_ptr<step_runner> make_runner(step_plan plan, const std::optional<c10::Device>& device,
                                         bool capturable) {
  if (!device || device->is_cpu()) return make_host_runner(std::move(plan));
#if defined(STEPGRAPH_LIBTORCH_CUDA)
  return make_cuda_runner(std::move(plan), *device, capturable);
#else
  (void)capturable;
  throw usage_error(
      fmt::format("the parameters are on {}, but this build of stepgraph runs CPU tensors only",
                  device->str()));
#endif
}

}  // namespace

group_options to_core(const AdamOptions& options, std::string name, std::uint64_t step) {
  group_options core;
  core.name = std::move(name);
  core.learning_rate = options.lr();
  core.beta1 = std::get<0>(options.betas());
  core.beta2 = std::get<1>(options.betas());
  core.eps = options.eps();
  core.weight_decay = options.weight_decay();
  core.mode = options.mode();
  core.bias_correction = options.bias_correction();
  core.maximize = options.maximize();
  core.schedule = options.schedule();
  core.step = step;
  return core;
}

step_options to_core(const StepOptions& options) {
  step_options core;
  core.skip_non_finite = options.skip_non_finite();
  core.max_grad_norm = options.max_grad_norm();
  core.loss_scale = options.loss_scale();
  core.zero_gradients = options.zero_gradients();
  return core;
}

AdamOptions& options_of(torch::optim::OptimizerParamGroup& group, std::size_t index) {
  auto& options = group.options();
  if (typeid(options) != typeid(AdamOptions)) {
    throw usage_error(fmt::format(
        "group {}: its options are of another type, expected stepgraph::libtorch::AdamOptions",
        index));
  }
  return static_cast<AdamOptions&>(options);
}

AdamParamState* find_state(const param_states& states, const at::Tensor& parameter) {
  const auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found == states.end() || !found->second) return nullptr;
  return dynamic_cast<AdamParamState*>(found->second.get());
}

std::string step_engine::name_of_parameter(std::size_t group, std::size_t index,
                                           std::size_t flat) const {
  if (flat < options_.names().size()) return options_.names()[flat];
  return fmt::format("group {} parameter {}", group, index);
}

const step_plan& step_engine::plan() const {
  if (!runner_) throw usage_error("plan: nothing is built yet, expected a step or prepare before");
  return runner_->core().plan();
}

void step_engine::step(param_groups& groups, param_states& states) {
  // First, so that a step that cannot run changes nothing.
  if (runner_) runner_->check_launch();
  prepare(groups, states);
  if (runner_->launch(pending_)) {
    pending_ = false;
    undelivered_.reset();
  }
  // Autograd then notices a backward through values that the step has overwritten.
  const auto note_change = [](const held_memory& held) {
    c10::TensorImpl* impl = held.tensor().unsafeGetTensorImpl();
    if (!impl->is_inference()) impl->bump_version();
  };
  for (const bound_parameter& bound : parameters_) {
    note_change(bound.parameter);
    if (options_.zero_gradients()) note_change(bound.gradient);
  }
}

void step_engine::prepare(param_groups& groups, param_states& states) {
  if (!runner_ || rebuild_ || !revalidate(groups, states)) build(groups, states);
}

void step_engine::deliver(param_groups& groups) {
  if (!runner_ || !runner_->can_deliver()) return;
  runner_->check_not_capturing("deliver");
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const AdamOptions& options = options_of(groups[g], g);
    if (g >= groups_.size() || &options != groups_[g].identity ||
        !send_options(static_cast<group_id>(g), groups_[g], options)) {
      throw usage_error(fmt::format(
          "deliver: group {} is new or its mode, bias_correction, maximize, schedule or "
          "master_weights changed, which only a step outside captures can take on",
          g));
    }
  }
  runner_->deliver();
  pending_ = false;
  undelivered_.reset();
}

void step_engine::check_loadable(const param_groups& groups,
                                 const std::vector<AdamOptions>& options,
                                 std::optional<double> max_grad_norm) const {
  if (!runner_) return;
  runner_->check_not_capturing("load");
  if (!captured()) return;
  bool as_captured =
      groups.size() == groups_.size() && (measures_norm() || max_grad_norm.value_or(0.0) == 0.0);
  for (std::size_t g = 0; as_captured && g < groups.size(); ++g) {
    as_captured = groups_[g].identity == &groups[g].options() &&
                  groups_[g].parameters == groups[g].params().size() &&
                  same_plan_options(options[g], groups_[g].sent);
  }
  if (!as_captured) {
    throw usage_error(
        "load: the checkpoint's groups, mode, bias_correction, maximize, schedule, master_weights "
        "or max_grad_norm need another plan than the step that was captured; call "
        "abandon_captured_steps when the captured graphs are gone");
  }
}

void step_engine::abandon_captured_steps() noexcept {
  if (runner_) runner_->abandon_captures();
}

void step_engine::resume_schedule(param_groups& groups, std::size_t group) {
  if (group >= groups.size()) {
    throw usage_error(
        fmt::format("group {} does not exist, the optimizer has {} groups", group, groups.size()));
  }
  const AdamOptions& options = options_of(groups[group], group);
  if (!options.schedule()) {
    throw usage_error(fmt::format("group {}: has no schedule to resume", group));
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    known_group& known = groups_[g];
    if (known.identity != &options) continue;
    if (runner_ && runner_->core().plan().groups[g].schedule) {
      runner_->core().resume_schedule(static_cast<group_id>(g));
      pending_ = true;
    }
    known.learning_rate_by_hand = false;
    known.sent.lr(options.lr());
  }
}

void step_engine::set_loss_scale(double value) {
  if (runner_) {
    runner_->core().set_loss_scale(value);
    pending_ = true;
  } else {
    step_builder().set_options({.loss_scale = value});
  }
  options_.loss_scale(value);
}

bool step_engine::measures_norm() const {
  const step_options& built = runner_->core().plan().options;
  return built.skip_non_finite || built.max_grad_norm > 0.0;
}

void step_engine::set_max_grad_norm(double value) {
  step_builder().set_options({.max_grad_norm = value});
  if (runner_ && (measures_norm() || (captured() && value > 0.0))) {
    runner_->core().set_max_grad_norm(value);
    pending_ = true;
  } else if (runner_ && value > 0.0) {
    rebuild_ = true;
  }
  options_.max_grad_norm(value);
}

bool step_engine::revalidate(param_groups& groups, const param_states& states) {
  if (groups.size() != groups_.size()) return false;
  if (states_may_differ_) {
    if (!states_are_bound(states)) return false;
    states_may_differ_ = false;
  }
  tensor_id id = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const AdamOptions& options = options_of(groups[g], g);
    known_group& known = groups_[g];
    const std::vector<at::Tensor>& parameters = groups[g].params();
    if (&options != known.identity || parameters.size() != known.parameters ||
        !send_options(static_cast<group_id>(g), known, options)) {
      return false;
    }
    for (const at::Tensor& parameter : parameters) {
      bound_parameter& bound = parameters_[id];
      const c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
      // Not Tensor::grad, which also asks autograd whether the tensor is a leaf.
      const at::Tensor& gradient = impl->grad();
      if (!bound.parameter.is_surely(*impl) ||
          !bound.gradient.is_surely(*gradient.unsafeGetTensorImpl())) {
        if (!revalidate_memory(id, bound, parameter, gradient)) return false;
      }
      ++id;
    }
  }
  return true;
}

bool step_engine::send_options(group_id group, known_group& known, const AdamOptions& options) {
  AdamOptions& sent = known.sent;
  if (options == sent) return true;
  if (!same_plan_options(options, sent)) return false;
  executor& core = runner_->core();
  // Each value is noted only once the executor has accepted it, so a refused one is refused again
  // at the next step instead of being forgotten.
  if (options.lr() != sent.lr()) {
    core.set_learning_rate(group, options.lr());
    sent.lr(options.lr());
    known.learning_rate_by_hand = true;
    pending_ = true;
  }
  if (options.betas() != sent.betas()) {
    core.set_betas(group, std::get<0>(options.betas()), std::get<1>(options.betas()));
    sent.betas(options.betas());
    pending_ = true;
  }
  if (options.eps() != sent.eps()) {
    core.set_eps(group, options.eps());
    sent.eps(options.eps());
    pending_ = true;
  }
  if (options.weight_decay() != sent.weight_decay()) {
    core.set_weight_decay(group, options.weight_decay());
    sent.weight_decay(options.weight_decay());
    pending_ = true;
  }
  return true;
}

bool step_engine::revalidate_memory(tensor_id id, bound_parameter& bound,
                                    const at::Tensor& parameter, const at::Tensor& gradient) {
  if (parameter.unsafeGetTensorImpl() != bound.parameter.tensor().unsafeGetTensorImpl()) {
    return false;
  }
  check_parameter(bound.name, parameter);
  if (parameter.device() != *device_) {
    throw usage_error(fmt::format(
        "{}: the parameter moved to {} after a step on {}; load a checkpoint of this optimizer "
        "into a new one instead",
        bound.name, parameter.device().str(), device_->str()));
  }
  check_gradient(bound.name, parameter, gradient);
  const plan_tensor& planned = runner_->core().plan().tensors[id];
  if (static_cast<std::uint64_t>(parameter.numel()) != planned.operands.parameter.numel) {
    throw usage_error(
        fmt::format("{}: the parameter has {} elements, expected {} as at the step "
                    "before",
                    bound.name, parameter.numel(), planned.operands.parameter.numel));
  }
  if (parameter.dtype() != bound.parameter.type() || gradient.dtype() != bound.gradient.type()) {
    return false;
  }
  if (!same_layout(parameter, bound.state[0].tensor())) return false;
  rebind(id, operand_kind::parameter, bound.parameter, held_memory(parameter), bound.name);
  rebind(id, operand_kind::gradient, bound.gradient, held_memory(gradient), bound.name);
  return true;
}

void step_engine::rebind(tensor_id id, operand_kind operand, held_memory& held, held_memory now,
                         const std::string& name) {
  if (now.data() != held.data()) {
    if (runner_->captured()) {
      throw usage_error(fmt::format(
          "{}: the {} moved to other memory after the step was captured; replays would go on using "
          "the old one. Keep it in place (zero_grad(false)), or call abandon_captured_steps when "
          "the captured graphs are gone",
          name, stepgraph::name_of(operand)));
    }
    runner_->core().rebind(id, operand, now.data());
    pending_ = true;
    ++rebinds_;
  }
  runner_->retire(held.storage());
  held = std::move(now);
}

bool step_engine::states_are_bound(const param_states& states) const {
  const auto is_bound = [](const at::Tensor& tensor, const held_memory& held) {
    if (!tensor.defined() || !held.tensor().defined())
      return tensor.defined() == held.tensor().defined();
    return tensor.layout() == at::kStrided && tensor.scalar_type() == at::kFloat &&
           tensor.mutable_data_ptr() == held.data() && same_layout(tensor, held.tensor()) &&
           tensor.storage().unsafeGetStorageImpl() == held.storage().unsafeGetStorageImpl();
  };
  return std::all_of(parameters_.begin(), parameters_.end(), [&](const bound_parameter& bound) {
    const AdamParamState* state = find_state(states, bound.parameter.tensor());
    return state != nullptr && is_bound(state->exp_avg(), bound.state[0]) &&
           is_bound(state->exp_avg_sq(), bound.state[1]) &&
           is_bound(state->master(), bound.state[2]);
  });
}

std::optional<c10::Device> step_engine::check_operands(const param_groups& groups) const {
  std::optional<c10::Device> device;
  std::unordered_map<const c10::TensorImpl*, std::string> seen;
  std::size_t flat = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      const std::string name = name_of_parameter(g, i, flat++);
      check_parameter(name, parameter);
      const auto [other, fresh] = seen.emplace(parameter.unsafeGetTensorImpl(), name);
      if (!fresh) {
        throw usage_error(
            fmt::format("{}: the parameter is also {}, expected it once", name, other->second));
      }
      if (!device) device = parameter.device();
      if (parameter.device() != *device) {
        throw usage_error(fmt::format(
            "{}: the parameter is on {}, expected {} as {}; use one optimizer for each device",
            name, parameter.device().str(), device->str(), name_of_parameter(0, 0, 0)));
      }
      if (runner_ && device_ && *device != *device_) {
        throw usage_error(fmt::format(
            "{}: the parameter moved to {} after a step on {}; load a checkpoint of this optimizer "
            "into a new one instead",
            name, device->str(), device_->str()));
      }
      check_gradient(name, parameter, parameter.unsafeGetTensorImpl()->grad());
    }
  }
  return device;
}

std::uint64_t step_engine::step_of_group(param_groups& groups, std::size_t group, std::size_t first,
                                         const param_states& states) const {
  const std::vector<at::Tensor>& parameters = groups[group].params();
  if (parameters.empty()) {
    const known_group* known = find_group(options_of(groups[group], group));
    return known == nullptr ? 0 : known->step;
  }
  std::optional<std::int64_t> common;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const AdamParamState* state = find_state(states, parameters[i]);
    const std::int64_t step = state == nullptr ? 0 : state->step();
    if (!common) common = step;
    if (step != *common) {
      throw usage_error(fmt::format(
          "{}: the parameter is at step {}, expected {} as {}; a group has one step count, so add "
          "new parameters as a group of their own",
          name_of_parameter(group, i, first + i), step, *common,
          name_of_parameter(group, 0, first)));
    }
  }
  return static_cast<std::uint64_t>(*common);
}

const step_engine::known_group* step_engine::find_group(const AdamOptions& options) const {
  for (const known_group& known : groups_) {
    if (known.identity == &options) return &known;
  }
  return nullptr;
}

step_engine::known_group step_engine::known_after_build(const AdamOptions& options,
                                                        std::size_t parameters,
                                                        std::uint64_t step) const {
  known_group result;
  result.identity = &options;
  result.sent = options;
  result.parameters = parameters;
  result.step = step;
  const known_group* before = find_group(options);
  // A schedule that was just assigned runs; one that was held by hand stays held.
  if (before != nullptr && options.schedule() && same_schedule(options, before->sent)) {
    result.learning_rate_by_hand =
        before->learning_rate_by_hand || before->sent.lr() != options.lr();
  }
  return result;
}

namespace {

/// The state that an update of `parameter` needs, made of what exists.
AdamParamState conformed_state(const AdamParamState* existing, const at::Tensor& parameter,
                               const AdamOptions& options, const std::string& name,
                               bool capturing) {
  const auto refuse_copy_in_capture = [&](const char* operand) {
    // Recorded, the copy would be repeated by every replay; beside the capture, it could read
    // memory that earlier work is still writing.
    if (!capturing) return;
    throw usage_error(fmt::format(
        "{}: {} must be copied before the first step, which a stream that is being captured cannot "
        "do; call prepare, or step once, before the capture",
        name, operand));
  };
  const at::TensorOptions f32 = parameter.options().dtype(at::kFloat);
  const auto conform = [&](const at::Tensor& state, const char* operand) {
    if (!state.defined()) return at::zeros_like(parameter, f32, at::MemoryFormat::Preserve);
    if (state.layout() == at::kStrided && state.scalar_type() == at::kFloat &&
        state.device() == parameter.device() && same_layout(state, parameter)) {
      return state;
    }
    if (state.sizes() != parameter.sizes()) {
      throw usage_error(fmt::format("{}: {} has sizes {}, expected {} as the parameter", name,
                                    operand, c10::str(state.sizes()), c10::str(parameter.sizes())));
    }
    refuse_copy_in_capture(operand);
    return at::empty_like(parameter, f32, at::MemoryFormat::Preserve).copy_(state);
  };

  static const AdamParamState none;
  const AdamParamState& source = existing == nullptr ? none : *existing;
  AdamParamState result;
  result.step(source.step());
  result.exp_avg(conform(source.exp_avg(), "exp_avg"));
  result.exp_avg_sq(conform(source.exp_avg_sq(), "exp_avg_sq"));
  if (options.master_weights() && parameter.scalar_type() != at::kFloat) {
    if (source.master().defined()) {
      result.master(conform(source.master(), "master"));
    } else {
      refuse_copy_in_capture("master");
      result.master(at::empty_like(parameter, f32, at::MemoryFormat::Preserve).copy_(parameter));
    }
  }
  return result;
}

}  // namespace

void step_engine::build(param_groups& groups, param_states& states) {
  if (captured()) {
    throw usage_error(
        "step: groups, formats, states or options changed in a way that needs another plan, but "
        "the step was captured and replays would go on with the old one; call "
        "abandon_captured_steps when the captured graphs are gone");
  }
  std::uint64_t skipped = skipped_before_;
  if (runner_) {
    runner_->check_not_capturing("step, which must be built anew");
    skipped = refresh_counts(states).skipped;
  }

  const at::NoGradGuard no_grad;
  const std::optional<c10::Device> device = check_operands(groups);
  build_scope scope(device);

  // Everything is made beside what exists and takes its place at the end, so that a refusal
  // leaves the optimizer as it was.
  step_builder builder;
  builder.set_options(to_core(options_));
  std::vector<known_group> known_groups;
  std::vector<bound_parameter> bound_parameters;
  std::vector<AdamParamState> new_states;
  step_counts counts{.step = step_, .groups = {}};
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const AdamOptions& options = options_of(groups[g], g);
    const std::vector<at::Tensor>& parameters = groups[g].params();
    const std::size_t first = bound_parameters.size();
    const std::uint64_t group_step = step_of_group(groups, g, first, states);
    counts.groups.push_back(group_step);
    known_groups.push_back(known_after_build(options, parameters.size(), group_step));
    const group_id group = builder.add_group(to_core(options, "", group_step));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      const at::Tensor& gradient = parameter.unsafeGetTensorImpl()->grad();
      bound_parameter bound;
      bound.name = name_of_parameter(g, i, first + i);
      AdamParamState state = conformed_state(find_state(states, parameter), parameter, options,
                                             bound.name, scope.capturing());
      tensor_operands operands;
      operands.name = bound.name;
      operands.parameter = view_of(parameter);
      operands.gradient = view_of(gradient);
      if (state.master().defined()) operands.master = view_of(state.master());
      operands.exp_avg = view_of(state.exp_avg());
      operands.exp_avg_sq = view_of(state.exp_avg_sq());
      builder.add_tensor(group, std::move(operands));

      bound.parameter = held_memory(parameter);
      bound.gradient = held_memory(gradient);
      bound.state[0] = held_memory(state.exp_avg());
      bound.state[1] = held_memory(state.exp_avg_sq());
      if (state.master().defined()) bound.state[2] = held_memory(state.master());
      bound_parameters.push_back(std::move(bound));
      new_states.push_back(std::move(state));
    }
  }

  const bool capturable = capturable_ || scope.capturing();
  std::unique_ptr<step_runner> runner = make_runner(builder.build(), device, capturable);
  bool pending = false;
  for (std::size_t g = 0; g < known_groups.size(); ++g) {
    if (!known_groups[g].learning_rate_by_hand) continue;
    runner->core().set_learning_rate(static_cast<group_id>(g), known_groups[g].sent.lr());
    pending = true;
  }
  if (step_ != 0) {
    runner->core().set_step(step_);
    pending = true;
  }
  scope.finish();

  std::unordered_set<void*> keys;
  for (std::size_t i = 0; i < bound_parameters.size(); ++i) {
    void* key = bound_parameters[i].parameter.tensor().unsafeGetTensorImpl();
    keys.insert(key);
    AdamParamState* state = find_state(states, bound_parameters[i].parameter.tensor());
    if (state != nullptr) {
      *state = std::move(new_states[i]);
    } else {
      states[key] = std::make_unique<AdamParamState>(std::move(new_states[i]));
    }
  }
  // Keys are addresses: once the optimizer holds no parameter there, another tensor may come.
  for (auto entry = states.begin(); entry != states.end();) {
    entry = keys.count(entry->first) == 0 ? states.erase(entry) : std::next(entry);
  }
  runner_ = std::move(runner);  // ends the old executor, which waits for its launches
  parameters_ = std::move(bound_parameters);
  groups_ = std::move(known_groups);
  device_ = device;
  capturable_ = capturable;
  skipped_before_ = skipped;
  pending_ = pending;
  undelivered_.reset();
  if (step_ != 0) undelivered_ = std::move(counts);
  rebuild_ = false;
  states_may_differ_ = false;
  ++captures_;
}

step_status step_engine::refresh_counts(const param_states& states) {
  step_status status = runner_->core().status();
  if (undelivered_) {
    status.step = undelivered_->step;
    for (std::size_t g = 0; g < status.groups.size(); ++g) {
      status.groups[g].step = undelivered_->groups[g];
    }
  }
  status.skipped += skipped_before_;

  step_ = status.step;
  std::size_t id = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].step = status.groups[g].step;
    for (std::size_t i = 0; i < groups_[g].parameters; ++i) {
      AdamParamState* state = find_state(states, parameters_[id++].parameter.tensor());
      if (state != nullptr) state->step(static_cast<std::int64_t>(groups_[g].step));
    }
  }
  return status;
}

step_status step_engine::status(const param_groups& groups, const param_states& states) {
  if (runner_) {
    runner_->check_not_capturing("status");
    return refresh_counts(states);
  }
  step_status status;
  status.loss_scale = options_.loss_scale();
  const step_counts known = counts(groups, states);
  status.step = known.step;
  for (const std::uint64_t step : known.groups) status.groups.push_back({.step = step});
  return status;
}

step_counts step_engine::counts(const param_groups& groups, const param_states& states) {
  if (runner_) {
    runner_->check_not_capturing("save");
    refresh_counts(states);
  }
  step_counts result{.step = step_, .groups = {}};
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    const auto& options = static_cast<const AdamOptions&>(group.options());
    const known_group* known = find_group(options);
    result.groups.push_back(known == nullptr ? 0 : known->step);
  }
  return result;
}

std::vector<bool> step_engine::learning_rates_by_hand(const param_groups& groups) const {
  std::vector<bool> result;
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    const auto& options = static_cast<const AdamOptions&>(group.options());
    const known_group* known = find_group(options);
    // As the next step will see it.
    result.push_back(known != nullptr && options.schedule() &&
                     same_schedule(options, known->sent) &&
                     (known->learning_rate_by_hand || known->sent.lr() != options.lr()));
  }
  return result;
}

void step_engine::restore(param_groups& groups, const step_counts& counts,
                          const std::vector<bool>& learning_rate_by_hand) {
  step_ = counts.step;
  bool as_built = runner_ && groups.size() == groups_.size();
  for (std::size_t g = 0; as_built && g < groups.size(); ++g) {
    as_built = groups_[g].identity == &groups[g].options() &&
               groups_[g].parameters == groups[g].params().size();
  }
  if (!as_built) {
    // The next step builds, from the counts in the states; the executor's are out of date.
    runner_.reset();
    parameters_.clear();
    std::vector<known_group> fresh;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      known_group known;
      known.identity = &options_of(groups[g], g);
      known.sent = *known.identity;
      known.step = counts.groups[g];
      known.learning_rate_by_hand = learning_rate_by_hand[g];
      fresh.push_back(std::move(known));
    }
    groups_ = std::move(fresh);
    return;
  }
  executor& core = runner_->core();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto group = static_cast<group_id>(g);
    known_group& known = groups_[g];
    known.step = counts.groups[g];
    core.set_group_step(group, counts.groups[g]);
    if (core.plan().groups[g].schedule && same_schedule(*known.identity, known.sent)) {
      known.learning_rate_by_hand = learning_rate_by_hand[g];
      if (known.learning_rate_by_hand) {
        core.set_learning_rate(group, known.identity->lr());
      } else {
        core.resume_schedule(group);
      }
      known.sent.lr(known.identity->lr());
    }
  }
  core.set_step(counts.step);
  undelivered_ = counts;
  pending_ = true;
}

}  // namespace stepgraph::libtorch::detail
