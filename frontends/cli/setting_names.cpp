#include "setting_names.hpp"

namespace stepgraph::cli {

const char* name_of(parameter_type type) {
  switch (type) {
    case parameter_type::f32:
      return "f32";
    case parameter_type::bf16:
      return "bf16";
    case parameter_type::f16:
      return "f16";
  }
  return "unknown";
}

const char* name_of(loss_scale_rule rule) {
  switch (rule) {
    case loss_scale_rule::fixed:
      return "none";
    case loss_scale_rule::torch_amp:
      return "torch";
    case loss_scale_rule::megatron:
      return "megatron";
  }
  return "unknown";
}

}  // namespace stepgraph::cli
