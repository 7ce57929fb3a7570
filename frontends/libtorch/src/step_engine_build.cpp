#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "step_engine.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/step_builder.hpp"

// From torch's groups and states to a plan and its executor.

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

std::shared_ptr<step_runner> make_runner(step_plan plan, const std::optional<c10::Device>& device,
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

void step_engine::check_inputs(const param_groups& groups,
                               const std::optional<c10::Device>& device) const {
  const c10::Device expected = device.value_or(at::kCPU);
  const auto check = [&](const std::string& name, const at::Tensor& input) {
    if (!input.defined()) return;
    check_scalar_input(name, input);
    if (input.device() != expected) {
      throw usage_error(fmt::format("{}: the tensor is on {}, expected {} as the parameters", name,
                                    input.device().str(), expected.str()));
    }
  };
  check("found_inf", options_.found_inf());
  check("loss_scale_input", options_.loss_scale_input());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    check(fmt::format("group {}: lr_tensor", g),
          static_cast<const AdamOptions&>(groups[g].options()).lr_tensor());
  }
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

step_engine::known_group step_engine::known_after_build(const AdamOptions& options,
                                                        std::size_t parameters,
                                                        std::uint64_t step) const {
  known_group result;
  result.identity = &options;
  result.sent = options;
  result.parameters = parameters;
  result.step = step;
  if (options.lr_tensor().defined()) result.lr_tensor = held_memory(options.lr_tensor());
  if (const known_group* before = find_group(options)) result.held = held_next(*before, options);
  return result;
}

bool step_engine::send_progress(executor& core, const std::vector<known_group>& groups,
                                const step_status& progress) const {
  bool sent = false;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto group = static_cast<group_id>(g);
    if (groups[g].held.learning_rate) core.set_learning_rate(group, groups[g].sent.lr());
    if (groups[g].held.weight_decay) core.set_weight_decay(group, groups[g].sent.weight_decay());
    sent = sent || groups[g].held.learning_rate || groups[g].held.weight_decay;
  }
  if (is_first_state()) return sent;
  core.load_state(progress);
  return true;
}

void step_engine::build(param_groups& groups, param_states& states) {
  if (captured()) {
    throw usage_error(
        "step: groups, formats, states or options changed in a way that needs another plan, but "
        "the step was captured and replays would go on with the old one; call "
        "abandon_captured_steps when the captured graphs are gone");
  }
  if (runner_) {
    runner_->check_not_capturing("step, which must be built anew");
    refresh(states);
    drain_records();
  }

  const at::NoGradGuard no_grad;
  const std::optional<c10::Device> device = check_operands(groups);
  check_inputs(groups, device);
  build_scope scope(device);

  // Everything is made beside what exists and takes its place at the end, so that a refusal
  // leaves the optimizer as it was.
  step_builder builder;
  builder.set_options(to_core(options_));
  std::vector<known_group> known_groups;
  std::vector<bound_parameter> bound_parameters;
  std::vector<AdamParamState> new_states;
  step_status progress = progress_;
  progress.groups.clear();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const AdamOptions& options = options_of(groups[g], g);
    const std::vector<at::Tensor>& parameters = groups[g].params();
    const std::size_t first = bound_parameters.size();
    const std::uint64_t group_step = step_of_group(groups, g, first, states);
    progress.groups.push_back({.step = group_step});
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
  std::shared_ptr<step_runner> runner = make_runner(builder.build(), device, capturable);
  const bool pending = send_progress(runner->core(), known_groups, progress);
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
  drop_runner();  // waits for the launches of the old executor
  runner_ = std::move(runner);
  parameters_ = std::move(bound_parameters);
  groups_ = std::move(known_groups);
  const auto held = [](const at::Tensor& input) {
    return input.defined() ? held_memory(input) : held_memory();
  };
  found_inf_ = held(options_.found_inf());
  loss_scale_input_ = held(options_.loss_scale_input());
  device_ = device;
  capturable_ = capturable;
  launches_before_ = last_launch_;
  pending_ = pending;
  undelivered_loss_scale_.reset();
  undelivered_.reset();
  if (!is_first_state()) undelivered_ = std::move(progress);
  rebuild_ = false;
  states_may_differ_ = false;
  ++captures_;
}

}  // namespace stepgraph::libtorch::detail
