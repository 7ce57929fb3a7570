#pragma once

#include <cmath>
#include <cstdint>

#include "stepgraph/math/loss_scale.hpp"

/// The hosts' loss scalers, written down again from their sources.
namespace stepgraph::test {

/// torch._amp_update_scale_ as ATen's kernels do it: products in double.
class reference_torch_scaler {
 public:
  reference_torch_scaler(float initial, const loss_scaling& scaling)
      : scale(initial), scaling_(scaling) {}

  void update(bool found_inf) {
    if (found_inf) {
      scale = static_cast<float>(scale * scaling_.backoff_factor);
      growth_tracker = 0;
      return;
    }
    const int successful = growth_tracker + 1;
    if (successful != static_cast<int>(scaling_.growth_interval)) {
      growth_tracker = successful;
      return;
    }
    const auto grown = static_cast<float>(scale * scaling_.growth_factor);
    if (std::isfinite(grown)) scale = grown;
    growth_tracker = 0;
  }

  float scale;
  int growth_tracker = 0;
  int hysteresis_tracker = 1;  ///< not of this rule: never moves

 private:
  loss_scaling scaling_;
};

/// megatron.core.optimizer.grad_scaler.DynamicGradScaler.update: an f32 tensor times Python floats.
class reference_megatron_scaler {
 public:
  reference_megatron_scaler(float initial, const loss_scaling& scaling)
      : scale(initial),
        hysteresis_tracker(static_cast<int>(scaling.hysteresis)),
        scaling_(scaling) {}

  void update(bool found_inf) {
    if (found_inf) {
      growth_tracker = 0;
      --hysteresis_tracker;
      if (hysteresis_tracker <= 0) {
        scale = std::fmax(scale * static_cast<float>(scaling_.backoff_factor),
                          static_cast<float>(scaling_.minimum));
      }
      return;
    }
    ++growth_tracker;
    if (growth_tracker == static_cast<int>(scaling_.growth_interval)) {
      growth_tracker = 0;
      hysteresis_tracker = static_cast<int>(scaling_.hysteresis);
      scale *= static_cast<float>(scaling_.growth_factor);
    }
  }

  float scale;
  int growth_tracker = 0;
  int hysteresis_tracker;

 private:
  loss_scaling scaling_;
};

}  // namespace stepgraph::test
