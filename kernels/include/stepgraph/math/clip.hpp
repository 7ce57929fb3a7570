#pragma once

#include "stepgraph/math/portability.hpp"

namespace stepgraph::math {

/// The factor that brings a gradient of norm `norm` down to `max_norm`: min(1, max_norm / (norm +
/// 1e-6)), the rule of PyTorch and Megatron-LM. A `max_norm` of 0 or less means no clipping.
STEPGRAPH_HOST_DEVICE double clip_coefficient(double norm, double max_norm) {
  if (!(max_norm > 0.0)) return 1.0;
  const double bounded = norm + 1e-6;
  // Most steps of a training are not clipped, and every update waits for the division.
  if (bounded <= max_norm) return 1.0;
  const double coefficient = max_norm / bounded;
  return coefficient < 1.0 ? coefficient : 1.0;
}

}  // namespace stepgraph::math
