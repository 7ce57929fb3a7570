#include "stepgraph/libtorch/adam_options.hpp"

#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "core_options.hpp"
#include "schedule_archive.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::libtorch {
namespace {

template <class T>
void read_if_there(torch::serialize::InputArchive& archive, const char* key, T& value) {
  c10::IValue stored;
  if (archive.try_read(key, stored)) value = stored.to<T>();
}

}  // namespace

bool operator==(const AdamOptions& lhs, const AdamOptions& rhs) {
  return lhs.lr() == rhs.lr() && lhs.betas() == rhs.betas() && lhs.eps() == rhs.eps() &&
         lhs.weight_decay() == rhs.weight_decay() && detail::same_plan_options(lhs, rhs);
}

double AdamOptions::get_lr() const {
  return lr_tensor().defined() ? static_cast<double>(lr_tensor().item<float>()) : lr();
}

void AdamOptions::set_lr(const double lr) {
  lr_ = lr;
  if (!lr_tensor().defined()) return;
  const at::NoGradGuard no_grad;
  lr_tensor().fill_(lr);
}

void AdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("lr", c10::IValue(get_lr()));
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  // torch's Adam and AdamW refuse an archive without it.
  archive.write("amsgrad", c10::IValue(false));
  archive.write("mode", c10::IValue(static_cast<int64_t>(mode())));
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(bias_correction);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(master_weights);
  detail::write_schedule(archive, "schedule", schedule());
  detail::write_schedule(archive, "weight_decay_schedule", weight_decay_schedule());
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
  detail::read_schedule(archive, "schedule", schedule());
  detail::read_schedule(archive, "weight_decay_schedule", weight_decay_schedule());
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
