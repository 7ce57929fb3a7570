#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>

#include "char_transformer.hpp"
#include "stepgraph/libtorch/adam.hpp"
#include "training.hpp"

namespace stepgraph::cli {

/// What a step says about itself.
struct step_report {
  double learning_rate = 0.0;
  double weight_decay = 0.0;  ///< of the matrices
  double grad_norm = 0.0;
  double loss_scale = 1.0;
  bool skipped = false;
};

/// What a training needs of its optimizer.
class step_optimizer {
 public:
  virtual ~step_optimizer() = default;

  /// What to multiply the loss by: one f32 where the model is.
  virtual torch::Tensor loss_scale() = 0;
  /// Called outside of the measured time, when there are gradients.
  virtual void prepare() = 0;
  /// Clips, updates and zeroes the gradients.
  virtual void step() = 0;
  /// Of the step just made, which has finished.
  virtual step_report report() = 0;
  virtual double next_loss_scale() = 0;
};

/// Scaling, clipping, schedules, update and zeroing in one step of stepgraph.
class stepgraph_optimizer final : public step_optimizer {
 public:
  /// The model must outlive it.
  stepgraph_optimizer(const char_transformer& model, const training_settings& settings);

  torch::Tensor loss_scale() override { return optimizer_.loss_scale_tensor(); }
  void prepare() override { optimizer_.prepare(); }
  void step() override { optimizer_.step(); }
  step_report report() override;
  double next_loss_scale() override;

  libtorch::Adam& optimizer() noexcept { return optimizer_; }
  /// Masters and moments, in the order of the groups.
  std::vector<torch::Tensor> states() const;

 private:
  libtorch::Adam optimizer_;
};

/// torch's own optimizer on f32 copies of the parameters, with scale, schedules and skips computed
/// on the host.
class reference_optimizer final : public step_optimizer {
 public:
  /// Both must outlive it.
  reference_optimizer(const char_transformer& model, const training_settings& settings);

  torch::Tensor loss_scale() override;
  void prepare() override;
  void step() override;
  step_report report() override { return report_; }
  double next_loss_scale() override { return static_cast<double>(scale_.scale); }

 private:
  const training_settings& settings_;
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> masters_;  ///< the parameters themselves if they are f32
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  loss_scale_state scale_;
  std::uint64_t applied_ = 0;
  step_report report_;
};

}  // namespace stepgraph::cli
