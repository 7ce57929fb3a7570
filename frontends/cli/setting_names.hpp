#pragma once

#include "stepgraph/math/loss_scale.hpp"
#include "training.hpp"

namespace stepgraph::cli {

/// As on the command line: "f32", "bf16", "f16"; "none", "torch", "megatron".
const char* name_of(parameter_type type);
const char* name_of(loss_scale_rule rule);

}  // namespace stepgraph::cli
