#include "step_engine.hpp"

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <iterator>
#include <utility>

#include "stepgraph/error.hpp"
#include "stepgraph/step_builder.hpp"

namespace stepgraph::libtorch::detail {

step_engine::step_engine(StepOptions options)
    : options_(std::move(options)), capturable_(options_.capturable()) {
  progress_.next_loss_scale = first_loss_scale();
}

step_engine::~step_engine() { drop_runner(); }

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
  if (runner_->launch(pending_)) delivered();
  // Autograd then notices a backward through values that the step has overwritten.
  const auto note_change = [](const at::Tensor& tensor) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->is_inference()) impl->bump_version();
  };
  const bool writes_gradients = options_.zero_gradients() || options_.unscale_gradients();
  for (const bound_parameter& bound : parameters_) {
    note_change(bound.parameter.tensor());
    if (writes_gradients) note_change(bound.gradient.tensor());
  }
  if (loss_scale_tensor_.defined()) note_change(loss_scale_tensor_);
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
      throw usage_error(
          fmt::format("deliver: group {} is new or its mode, bias_correction, maximize, schedules, "
                      "lr_tensor or "
                      "master_weights changed, which only a step outside captures can take on",
                      g));
    }
  }
  runner_->deliver();
  delivered();
}

void step_engine::delivered() {
  pending_ = false;
  undelivered_.reset();
  undelivered_loss_scale_.reset();
}

void step_engine::abandon_captured_steps() noexcept {
  if (runner_) runner_->abandon_captures();
}

step_engine::known_group* step_engine::group_to_resume(
    param_groups& groups, std::size_t group,
    const std::optional<schedule>& (AdamOptions::*of)() const) {
  if (group >= groups.size()) {
    throw usage_error(
        fmt::format("group {} does not exist, the optimizer has {} groups", group, groups.size()));
  }
  const AdamOptions& options = options_of(groups[group], group);
  if (!(options.*of)()) {
    throw usage_error(fmt::format("group {}: has no schedule to resume", group));
  }
  return find_group(options);
}

void step_engine::resume_schedule(param_groups& groups, std::size_t group) {
  known_group* known = group_to_resume(groups, group, &AdamOptions::schedule);
  if (known == nullptr) return;
  const auto id = static_cast<group_id>(known - groups_.data());
  if (runner_ && runner_->core().plan().groups[id].learning_rate_schedule) {
    runner_->core().resume_schedule(id);
    pending_ = true;
  }
  known->held.learning_rate = false;
  known->sent.lr(known->identity->lr());
}

void step_engine::resume_weight_decay_schedule(param_groups& groups, std::size_t group) {
  known_group* known = group_to_resume(groups, group, &AdamOptions::weight_decay_schedule);
  if (known == nullptr) return;
  const auto id = static_cast<group_id>(known - groups_.data());
  if (runner_ && runner_->core().plan().groups[id].weight_decay_schedule) {
    runner_->core().resume_weight_decay_schedule(id);
    pending_ = true;
  }
  known->held.weight_decay = false;
  known->sent.weight_decay(known->identity->weight_decay());
}

void step_engine::set_loss_scale(double value) {
  if (options_.loss_scale_input().defined()) {
    throw usage_error("set_loss_scale: the scale comes from loss_scale_input, write it there");
  }
  step_builder().set_options({.loss_scale = value});
  const auto scale = static_cast<float>(value);
  if (runner_) {
    runner_->core().set_loss_scale(value);
    pending_ = true;
    undelivered_loss_scale_ = scale;
    if (undelivered_) undelivered_->next_loss_scale.scale = scale;
  }
  progress_.next_loss_scale.scale = scale;
}

bool step_engine::measures_norm() const {
  return measures_gradients(runner_->core().plan().options);
}

void step_engine::set_norm_option(double value, void (executor::*set)(double)) {
  if (runner_ && (measures_norm() || (captured() && value > 0.0))) {
    (runner_->core().*set)(value);
    pending_ = true;
  } else if (runner_ && value > 0.0) {
    rebuild_ = true;
  }
}

void step_engine::set_max_grad_norm(double value) {
  step_builder().set_options({.max_grad_norm = value});
  set_norm_option(value, &executor::set_max_grad_norm);
  options_.max_grad_norm(value);
}

void step_engine::set_skip_above_norm(double value) {
  step_builder().set_options({.skip_above_norm = value});
  set_norm_option(value, &executor::set_skip_above_norm);
  options_.skip_above_norm(value);
}

void step_engine::set_samples_per_step(std::uint64_t samples) {
  if (runner_) {
    runner_->core().set_samples_per_step(samples);
    pending_ = true;
  }
  options_.samples_per_step(samples);
}

namespace {

/// Where the step runs, or will.
c10::Device device_of(const param_groups& groups) {
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    if (!group.params().empty() && group.params().front().defined()) {
      return group.params().front().device();
    }
  }
  return at::kCPU;
}

bool is_capturing(const c10::Device& device) {
#if defined(STEPGRAPH_LIBTORCH_CUDA)
  return device.is_cuda() && current_stream_is_capturing(device);
#else
  (void)device;
  return false;
#endif
}

}  // namespace

at::Tensor step_engine::loss_scale_tensor(const param_groups& groups) {
  if (options_.loss_scale_input().defined()) return options_.loss_scale_input();
  const c10::Device device = runner_ ? device_.value_or(at::kCPU) : device_of(groups);
  const at::TensorOptions f32 = at::TensorOptions(device).dtype(at::kFloat);
  if (runner_ && !undelivered_ && !undelivered_loss_scale_) {
    if (!loss_scale_tensor_.defined()) {
      // A tensor has no constant memory; that nobody writes is the caller's promise.
      auto* scale = const_cast<float*>(runner_->loss_scale_address());
      loss_scale_tensor_ = at::from_blob(
          scale, {}, [runner = runner_](void*) mutable { runner.reset(); }, f32, device);
    }
    return loss_scale_tensor_;
  }
  if (is_capturing(device)) {
    throw usage_error(
        "loss_scale_tensor: the scale of the next step is not on the device yet, and a replay "
        "would "
        "repeat the number of today; call prepare and deliver before the capture");
  }
  const step_status& known = undelivered_ ? *undelivered_ : progress_;
  return at::full({}, undelivered_loss_scale_.value_or(known.next_loss_scale.scale), f32);
}

void step_engine::drain_records() {
  record_batch batch = runner_->core().read_records();
  for (step_record& record : batch.records) {
    record.launch += launches_before_;
    last_launch_ = record.launch;
  }
  kept_records_.insert(kept_records_.end(), std::make_move_iterator(batch.records.begin()),
                       std::make_move_iterator(batch.records.end()));
  overwritten_records_ += batch.overwritten;
}

record_batch step_engine::records() {
  if (runner_) drain_records();
  return {std::exchange(kept_records_, {}), std::exchange(overwritten_records_, 0)};
}

void step_engine::drop_runner() noexcept {
  loss_scale_tensor_.reset();
  if (runner_ && runner_.use_count() > 1) {
    // Somebody keeps the loss scale of this executor, which otherwise would wait in its destructor.
    try {
      static_cast<void>(runner_->core().status());
    } catch (...) {  // NOLINT(bugprone-empty-catch): nothing to report it to; nothing launches
    }
  }
  runner_.reset();
}

}  // namespace stepgraph::libtorch::detail
