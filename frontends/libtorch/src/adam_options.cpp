#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "step_engine.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/libtorch/adam.hpp"

namespace stepgraph::libtorch {
namespace {

template <class T>
void read_if_there(torch::serialize::InputArchive& archive, const char* key, T& value) {
  c10::IValue stored;
  if (archive.try_read(key, stored)) value = stored.to<T>();
}

}  // namespace

namespace detail {

bool same_schedule(const AdamOptions& lhs, const AdamOptions& rhs) {
  const std::optional<learning_rate_schedule>& a = lhs.schedule();
  const std::optional<learning_rate_schedule>& b = rhs.schedule();
  if (!a || !b) return !a && !b;
  return a->shape == b->shape && a->initial == b->initial && a->maximum == b->maximum &&
         a->minimum == b->minimum && a->warmup_steps == b->warmup_steps &&
         a->decay_steps == b->decay_steps;
}

bool same_plan_options(const AdamOptions& a, const AdamOptions& b) {
  return a.mode() == b.mode() && a.bias_correction() == b.bias_correction() &&
         a.maximize() == b.maximize() && same_schedule(a, b) &&
         a.master_weights() == b.master_weights();
}

}  // namespace detail

bool operator==(const AdamOptions& lhs, const AdamOptions& rhs) {
  return lhs.lr() == rhs.lr() && lhs.betas() == rhs.betas() && lhs.eps() == rhs.eps() &&
         lhs.weight_decay() == rhs.weight_decay() && detail::same_plan_options(lhs, rhs);
}

void AdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  // torch's Adam and AdamW refuse an archive without it.
  archive.write("amsgrad", c10::IValue(false));
  archive.write("mode", c10::IValue(static_cast<int64_t>(mode())));
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(bias_correction);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(master_weights);
  archive.write("has_schedule", c10::IValue(schedule().has_value()));
  if (schedule()) {
    archive.write("schedule_shape", c10::IValue(static_cast<int64_t>(schedule()->shape)));
    archive.write("schedule_initial", c10::IValue(schedule()->initial));
    archive.write("schedule_maximum", c10::IValue(schedule()->maximum));
    archive.write("schedule_minimum", c10::IValue(schedule()->minimum));
    archive.write("schedule_warmup_steps",
                  c10::IValue(static_cast<int64_t>(schedule()->warmup_steps)));
    archive.write("schedule_decay_steps",
                  c10::IValue(static_cast<int64_t>(schedule()->decay_steps)));
  }
}

void AdamOptions::serialize(torch::serialize::InputArchive& archive) {
  bool amsgrad = false;
  read_if_there(archive, "amsgrad", amsgrad);
  if (amsgrad) {
    throw usage_error("the checkpoint was saved with amsgrad = true, expected false");
  }
  read_if_there(archive, "lr", lr());
  read_if_there(archive, "betas", betas());
  read_if_there(archive, "eps", eps());
  read_if_there(archive, "weight_decay", weight_decay());
  auto stored_mode = static_cast<int64_t>(mode());
  read_if_there(archive, "mode", stored_mode);
  mode(static_cast<weight_decay_mode>(stored_mode));
  read_if_there(archive, "bias_correction", bias_correction());
  read_if_there(archive, "maximize", maximize());
  read_if_there(archive, "master_weights", master_weights());

  c10::IValue has_schedule;
  if (!archive.try_read("has_schedule", has_schedule)) return;
  schedule(std::nullopt);
  if (!has_schedule.toBool()) return;
  learning_rate_schedule stored;
  int64_t shape = 0;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;
  read_if_there(archive, "schedule_shape", shape);
  read_if_there(archive, "schedule_initial", stored.initial);
  read_if_there(archive, "schedule_maximum", stored.maximum);
  read_if_there(archive, "schedule_minimum", stored.minimum);
  read_if_there(archive, "schedule_warmup_steps", warmup_steps);
  read_if_there(archive, "schedule_decay_steps", decay_steps);
  stored.shape = static_cast<schedule_shape>(shape);
  stored.warmup_steps = static_cast<std::uint64_t>(warmup_steps);
  stored.decay_steps = static_cast<std::uint64_t>(decay_steps);
  schedule(stored);
}

void AdamParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(master);
}

void AdamParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg_sq);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, master);
}

}  // namespace stepgraph::libtorch
