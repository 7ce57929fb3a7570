#include "loss_scale_options.hpp"

#include "command.hpp"

namespace stepgraph::cli {

void add_loss_scale_options(CLI::App& command, loss_scale_options& options) {
  command
      .add_option("--loss-scaling", options.rule,
                  "Rule of the loss scale: none, torch (torch.amp) or megatron (Megatron-LM); "
                  "default: torch for f16, else none")
      ->check(CLI::IsMember({"none", "torch", "megatron"}))
      ->default_str("");
  command
      .add_option("--loss-scale", options.first,
                  "First loss scale; default: 65536 (torch), 2^32 (megatron), 1 (none)")
      ->check(check_positive)
      ->default_str("");
  command
      .add_option("--growth-interval", options.growth_interval,
                  "Finite steps in a row before the loss scale grows; default: 2000 (torch), 1000 "
                  "(megatron)")
      ->check(CLI::Range(1, 1000000000))
      ->default_str("");
}

loss_scaling scaling_of(const loss_scale_options& options, const char* by_default) {
  const std::string rule = options.rule.value_or(by_default);
  loss_scaling scaling;
  if (rule == "torch") scaling.rule = loss_scale_rule::torch_amp;
  if (rule == "megatron") scaling = megatron_loss_scaling();
  if (options.growth_interval) {
    if (rule == "none") {
      throw CLI::ValidationError("--growth-interval", "is not used by --loss-scaling none");
    }
    scaling.growth_interval = *options.growth_interval;
  }
  return scaling;
}

double first_loss_scale(const loss_scale_options& options, const loss_scaling& scaling) {
  if (options.first) return *options.first;
  switch (scaling.rule) {
    case loss_scale_rule::torch_amp:
      return 65536.0;
    case loss_scale_rule::megatron:
      return 4294967296.0;
    case loss_scale_rule::fixed:
      break;
  }
  return 1.0;
}

}  // namespace stepgraph::cli
