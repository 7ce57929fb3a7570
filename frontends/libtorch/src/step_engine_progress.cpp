#include <fmt/format.h>
#include <torch/types.h>

#include "step_engine.hpp"
#include "stepgraph/error.hpp"

// Where the step stands: read back for status and checkpoints, and restored.

namespace stepgraph::libtorch::detail {

step_engine::known_group* step_engine::find_group(const AdamOptions& options) {
  for (known_group& known : groups_) {
    if (known.identity == &options) return &known;
  }
  return nullptr;
}

const step_engine::known_group* step_engine::find_group(const AdamOptions& options) const {
  for (const known_group& known : groups_) {
    if (known.identity == &options) return &known;
  }
  return nullptr;
}

loss_scale_state step_engine::first_loss_scale() const {
  return {static_cast<float>(options_.loss_scale()), 0,
          static_cast<std::int32_t>(options_.scaling().hysteresis)};
}

bool step_engine::is_first_state() const {
  const loss_scale_state& scale = progress_.next_loss_scale;
  const loss_scale_state first = first_loss_scale();
  return progress_.step == 0 && progress_.skipped == 0 && progress_.samples == 0 &&
         scale.scale == first.scale && scale.growth_tracker == first.growth_tracker &&
         scale.hysteresis_left == first.hysteresis_left;
}

const step_status& step_engine::refresh(const param_states& states) {
  step_status status = runner_->core().status();
  if (undelivered_) {
    status.step = undelivered_->step;
    status.skipped = undelivered_->skipped;
    status.samples = undelivered_->samples;
    status.next_loss_scale = undelivered_->next_loss_scale;
    for (std::size_t g = 0; g < status.groups.size(); ++g) {
      status.groups[g].step = undelivered_->groups[g].step;
    }
  } else if (undelivered_loss_scale_) {
    status.next_loss_scale.scale = *undelivered_loss_scale_;
  }

  std::size_t id = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].step = status.groups[g].step;
    for (std::size_t i = 0; i < groups_[g].parameters; ++i) {
      AdamParamState* state = find_state(states, parameters_[id++].parameter.tensor());
      if (state != nullptr) state->step(static_cast<std::int64_t>(groups_[g].step));
    }
  }
  progress_ = std::move(status);
  return progress_;
}

step_status step_engine::status(const param_groups& groups, const param_states& states) {
  if (runner_) {
    runner_->check_not_capturing("status");
    return refresh(states);
  }
  step_status status = progress(groups, states, "status");
  status.loss_scale = static_cast<double>(status.next_loss_scale.scale);
  return status;
}

step_status step_engine::progress(const param_groups& groups, const param_states& states,
                                  const char* caller) {
  if (runner_) {
    runner_->check_not_capturing(caller);
    refresh(states);
  }
  step_status result = progress_;
  result.groups.clear();
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    const known_group* known = find_group(static_cast<const AdamOptions&>(group.options()));
    result.groups.push_back({.step = known == nullptr ? 0 : known->step});
  }
  return result;
}

held_by_hand step_engine::held_next(const known_group& known, const AdamOptions& options) {
  // A schedule that was just assigned runs; one that is held by hand stays held.
  held_by_hand held;
  held.learning_rate = options.schedule() && options.schedule() == known.sent.schedule() &&
                       (known.held.learning_rate || known.sent.lr() != options.lr());
  held.weight_decay =
      options.weight_decay_schedule() &&
      options.weight_decay_schedule() == known.sent.weight_decay_schedule() &&
      (known.held.weight_decay || known.sent.weight_decay() != options.weight_decay());
  return held;
}

std::vector<held_by_hand> step_engine::held(const param_groups& groups) const {
  std::vector<held_by_hand> result;
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    const auto& options = static_cast<const AdamOptions&>(group.options());
    const known_group* known = find_group(options);
    result.push_back(known == nullptr ? held_by_hand{} : held_next(*known, options));
  }
  return result;
}

void step_engine::check_loadable(const param_groups& groups,
                                 const std::vector<AdamOptions>& options, bool needs_norm) const {
  if (!runner_) return;
  runner_->check_not_capturing("load");
  if (!captured()) return;
  bool as_captured = groups.size() == groups_.size() && (measures_norm() || !needs_norm);
  for (std::size_t g = 0; as_captured && g < groups.size(); ++g) {
    as_captured = groups_[g].identity == &groups[g].options() &&
                  groups_[g].parameters == groups[g].params().size() &&
                  same_plan_options(options[g], groups_[g].sent);
  }
  if (!as_captured) {
    throw usage_error(
        "load: the checkpoint's groups, mode, bias_correction, maximize, schedules, "
        "master_weights, "
        "max_grad_norm or skip_above_norm need another plan than the step that was captured; call "
        "abandon_captured_steps when the captured graphs are gone");
  }
}

void step_engine::restore(param_groups& groups, const step_status& progress,
                          const std::vector<held_by_hand>& held) {
  progress_ = progress;
  undelivered_loss_scale_.reset();
  bool as_built = runner_ && groups.size() == groups_.size();
  for (std::size_t g = 0; as_built && g < groups.size(); ++g) {
    as_built = groups_[g].identity == &groups[g].options() &&
               groups_[g].parameters == groups[g].params().size();
  }
  if (!as_built) {
    // The next step builds, from the counts in the states; the executor's are out of date.
    if (runner_) drain_records();
    drop_runner();
    parameters_.clear();
    undelivered_.reset();
    std::vector<known_group> fresh;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      known_group known;
      known.identity = &options_of(groups[g], g);
      known.sent = *known.identity;
      known.step = progress.groups[g].step;
      known.held = held[g];
      fresh.push_back(std::move(known));
    }
    groups_ = std::move(fresh);
    return;
  }
  executor& core = runner_->core();
  core.load_state(progress);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto group = static_cast<group_id>(g);
    known_group& known = groups_[g];
    const group_options& planned = core.plan().groups[g];
    known.step = progress.groups[g].step;
    if (planned.learning_rate_schedule && known.identity->schedule() == known.sent.schedule()) {
      known.held.learning_rate = held[g].learning_rate;
      if (held[g].learning_rate) {
        core.set_learning_rate(group, known.identity->lr());
      } else {
        core.resume_schedule(group);
      }
      known.sent.lr(known.identity->lr());
    }
    if (planned.weight_decay_schedule &&
        known.identity->weight_decay_schedule() == known.sent.weight_decay_schedule()) {
      known.held.weight_decay = held[g].weight_decay;
      if (held[g].weight_decay) {
        core.set_weight_decay(group, known.identity->weight_decay());
      } else {
        core.resume_weight_decay_schedule(group);
      }
      known.sent.weight_decay(known.identity->weight_decay());
    }
  }
  undelivered_ = progress;
  pending_ = true;
}

}  // namespace stepgraph::libtorch::detail
