#pragma once

#include <cstdint>

#include "stepgraph/math/portability.hpp"

namespace stepgraph {

enum class loss_scale_rule : std::uint32_t {
  fixed,      ///< stays as it was set
  torch_amp,  ///< torch.amp.GradScaler
  megatron,   ///< Megatron-LM's DynamicGradScaler
};

/// How the loss scale reacts to gradients that are not finite. The numbers are those of
/// torch.amp; Megatron-LM's own are `megatron_loss_scaling()`.
struct loss_scaling {
  loss_scale_rule rule = loss_scale_rule::fixed;
  std::uint32_t growth_interval = 2000;  ///< finite steps in a row before the scale grows
  std::uint32_t hysteresis = 1;          ///< megatron: bad steps before the scale shrinks
  std::uint32_t reserved = 0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  double minimum = 0.0;  ///< megatron: the scale never shrinks below it
};

/// Megatron-LM's own numbers, to start from a scale of 2^32.
constexpr loss_scaling megatron_loss_scaling() {
  return {loss_scale_rule::megatron, 1000, 2, 0, 2.0, 0.5, 1.0};
}

/// The loss scale and its counters.
struct loss_scale_state {
  float scale = 1.0f;
  std::uint32_t growth_tracker = 0;  ///< finite steps in a row
  std::int32_t hysteresis_left = 1;  ///< megatron: bad steps left before the scale shrinks
};

namespace math {

/// The state after a step whose gradients were finite or not.
///
/// torch_amp (as torch._amp_update_scale_): not finite: scale *= backoff, tracker = 0. Finite:
/// tracker += 1; at the interval scale *= growth, unless the product is not finite, and tracker =
/// 0. Products are taken in double and rounded to f32 once.
/// megatron (as DynamicGradScaler.update): not finite: tracker = 0, hysteresis -= 1; at zero and
/// below scale = max(scale * backoff, minimum). Finite: tracker += 1; at the interval tracker = 0,
/// hysteresis starts again and scale *= growth. Products are taken in f32.
STEPGRAPH_HOST_DEVICE loss_scale_state updated_loss_scale(const loss_scaling& scaling,
                                                          loss_scale_state state, bool found_inf) {
  const bool in_double = scaling.rule == loss_scale_rule::torch_amp;
  const auto scaled_by = [&](double factor) {
    return in_double ? static_cast<float>(static_cast<double>(state.scale) * factor)
                     : state.scale * static_cast<float>(factor);
  };
  switch (scaling.rule) {
    case loss_scale_rule::fixed:
      break;
    case loss_scale_rule::torch_amp:
      if (found_inf) {
        state.scale = scaled_by(scaling.backoff_factor);
        state.growth_tracker = 0;
      } else if (++state.growth_tracker == scaling.growth_interval) {
        const float grown = scaled_by(scaling.growth_factor);
        if (grown <= 3.402823466e+38f) state.scale = grown;
        state.growth_tracker = 0;
      }
      break;
    case loss_scale_rule::megatron:
      if (found_inf) {
        state.growth_tracker = 0;
        if (--state.hysteresis_left <= 0) {
          const float shrunk = scaled_by(scaling.backoff_factor);
          const float minimum = static_cast<float>(scaling.minimum);
          state.scale = shrunk > minimum ? shrunk : minimum;
        }
      } else if (++state.growth_tracker == scaling.growth_interval) {
        state.growth_tracker = 0;
        state.hysteresis_left = static_cast<std::int32_t>(scaling.hysteresis);
        state.scale = scaled_by(scaling.growth_factor);
      }
      break;
  }
  return state;
}

}  // namespace math
}  // namespace stepgraph
