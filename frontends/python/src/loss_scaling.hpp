#pragma once

#include "stepgraph/math/loss_scale.hpp"

namespace stepgraph::python {

/// How the loss scale behaves and where it starts.
struct loss_scaling_options {
  loss_scaling scaling;
  double initial = 1.0;
};

}  // namespace stepgraph::python
