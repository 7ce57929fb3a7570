#include <nanobind/operators.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "names.hpp"
#include "stepgraph/megatron_schedules.hpp"
#include "stepgraph/schedule.hpp"
#include "stepgraph/torch_schedules.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stepgraph::python {
namespace {

using list = std::vector<double>;
using counts = std::vector<std::uint64_t>;

// A segment as pickle keeps it: the fields in the order of the struct.
using segment_state = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t,
                                 std::uint64_t, double, double, double, double, double, double>;
using schedule_state = std::tuple<std::vector<segment_state>, list, std::string>;

schedule_state state_of(const schedule& self) {
  std::vector<segment_state> segments;
  segments.reserve(self.segments.size());
  for (const schedule_segment& each : self.segments) {
    segments.emplace_back(static_cast<std::uint32_t>(each.curve), each.table_count,
                          each.table_offset, each.begin, each.period, each.multiplier, each.from,
                          each.to, each.origin, each.length, each.ratio);
  }
  return {std::move(segments), self.table, to_name(self.clock)};
}

schedule from_state(const schedule_state& state) {
  const auto& [segments, table, clock] = state;
  schedule made;
  made.table = table;
  made.clock = from_name<schedule_clock>(clock);
  for (const segment_state& each : segments) {
    schedule_segment segment;
    std::uint32_t curve = 0;
    std::tie(curve, segment.table_count, segment.table_offset, segment.begin, segment.period,
             segment.multiplier, segment.from, segment.to, segment.origin, segment.length,
             segment.ratio) = each;
    segment.curve = static_cast<schedule_curve>(curve);
    made.segments.push_back(segment);
  }
  validate(made);
  return made;
}

void bind_general(nb::module_& module) {
  module.def(
      "constant",
      [](double value, const std::string& clock) {
        return schedules::constant(value, from_name<schedule_clock>(clock));
      },
      "value"_a, "clock"_a = "updates", "The same number always.");
  module.def(
      "table",
      [](list values, const std::string& clock) {
        return schedules::table(std::move(values), from_name<schedule_clock>(clock));
      },
      "values"_a, "clock"_a = "updates", "values[n] at clock n, and the last value ever after.");
  module.def(
      "sequence",
      [](const std::vector<schedule>& parts, const counts& milestones) {
        return schedules::sequence(parts, milestones);
      },
      "parts"_a, "milestones"_a,
      "One schedule after the other, by the rule of torch.optim.lr_scheduler.SequentialLR: "
      "parts[i] begins at milestones[i - 1], as if its own clock started there.");
  module.def(
      "scaled",
      [](const schedule& unscaled, double multiplier) {
        return schedules::scaled(unscaled, multiplier);
      },
      "schedule"_a, "multiplier"_a, "Every value multiplied by `multiplier`.");
}

void bind_megatron(nb::module_& module) {
  const schedules::megatron_learning_rate_options rate;
  module.def(
      "megatron_learning_rate",
      [](const std::string& style, double initial, double maximum, double minimum,
         std::uint64_t warmup, std::uint64_t decay, const std::string& wsd_style,
         std::uint64_t wsd_decay, const std::string& clock) {
        return schedules::megatron_learning_rate(
            {.style = from_name<schedules::megatron_learning_rate_style>(style),
             .initial = initial,
             .maximum = maximum,
             .minimum = minimum,
             .warmup = warmup,
             .decay = decay,
             .wsd_style = from_name<schedules::megatron_wsd_style>(wsd_style),
             .wsd_decay = wsd_decay,
             .clock = from_name<schedule_clock>(clock)});
      },
      nb::kw_only(), "style"_a = to_name(rate.style), "initial"_a = rate.initial, "maximum"_a,
      "minimum"_a = rate.minimum, "warmup"_a = rate.warmup, "decay"_a = rate.decay,
      "wsd_style"_a = to_name(rate.wsd_style), "wsd_decay"_a = rate.wsd_decay,
      "clock"_a = to_name(rate.clock),
      "The learning rate of Megatron-LM's OptimizerParamScheduler. Counts are in units of the "
      "clock.");
  const schedules::megatron_weight_decay_options decay;
  module.def(
      "megatron_weight_decay",
      [](const std::string& style, double start, double end, std::uint64_t increment,
         double multiplier, const std::string& clock) {
        return schedules::megatron_weight_decay(
            {.style = from_name<schedules::megatron_weight_decay_style>(style),
             .start = start,
             .end = end,
             .increment = increment,
             .multiplier = multiplier,
             .clock = from_name<schedule_clock>(clock)});
      },
      nb::kw_only(), "style"_a = to_name(decay.style), "start"_a, "end"_a,
      "increment"_a = decay.increment, "multiplier"_a = decay.multiplier,
      "clock"_a = to_name(decay.clock),
      "The weight decay of Megatron-LM's OptimizerParamScheduler.");
}

void bind_torch_decays(nb::module_& module) {
  const schedules::multi_step_lr_options multi_step;
  const schedules::constant_lr_options constant;
  const schedules::linear_lr_options linear;
  const schedules::polynomial_lr_options polynomial;
  module.def(
      "step_lr",
      [](double learning_rate, std::uint64_t step_size, double gamma) {
        return schedules::step_lr(
            {.learning_rate = learning_rate, .step_size = step_size, .gamma = gamma});
      },
      nb::kw_only(), "learning_rate"_a, "step_size"_a, "gamma"_a = 0.1, "torch's StepLR.");
  module.def(
      "multi_step_lr",
      [](double learning_rate, const counts& milestones, double gamma) {
        return schedules::multi_step_lr(
            {.learning_rate = learning_rate, .milestones = milestones, .gamma = gamma});
      },
      nb::kw_only(), "learning_rate"_a, "milestones"_a, "gamma"_a = multi_step.gamma,
      "torch's MultiStepLR.");
  module.def(
      "exponential_lr",
      [](double learning_rate, double gamma) {
        return schedules::exponential_lr({.learning_rate = learning_rate, .gamma = gamma});
      },
      nb::kw_only(), "learning_rate"_a, "gamma"_a, "torch's ExponentialLR.");
  module.def(
      "constant_lr",
      [](double learning_rate, double factor, std::uint64_t total_iters) {
        return schedules::constant_lr(
            {.learning_rate = learning_rate, .factor = factor, .total_iters = total_iters});
      },
      nb::kw_only(), "learning_rate"_a, "factor"_a = constant.factor,
      "total_iters"_a = constant.total_iters, "torch's ConstantLR.");
  module.def(
      "linear_lr",
      [](double learning_rate, double start_factor, double end_factor, std::uint64_t total_iters) {
        return schedules::linear_lr({.learning_rate = learning_rate,
                                     .start_factor = start_factor,
                                     .end_factor = end_factor,
                                     .total_iters = total_iters});
      },
      nb::kw_only(), "learning_rate"_a, "start_factor"_a = linear.start_factor,
      "end_factor"_a = linear.end_factor, "total_iters"_a = linear.total_iters,
      "torch's LinearLR.");
  module.def(
      "polynomial_lr",
      [](double learning_rate, std::uint64_t total_iters, double power) {
        return schedules::polynomial_lr(
            {.learning_rate = learning_rate, .total_iters = total_iters, .power = power});
      },
      nb::kw_only(), "learning_rate"_a, "total_iters"_a = polynomial.total_iters,
      "power"_a = polynomial.power, "torch's PolynomialLR.");
}

void bind_torch_cycles(nb::module_& module) {
  const schedules::cosine_annealing_lr_options cosine;
  const schedules::cosine_annealing_warm_restarts_options restarts;
  const schedules::one_cycle_lr_options cycle;
  module.def(
      "cosine_annealing_lr",
      [](double learning_rate, std::uint64_t t_max, double eta_min) {
        return schedules::cosine_annealing_lr(
            {.learning_rate = learning_rate, .t_max = t_max, .eta_min = eta_min});
      },
      nb::kw_only(), "learning_rate"_a, "t_max"_a, "eta_min"_a = cosine.eta_min,
      "torch's CosineAnnealingLR.");
  module.def(
      "cosine_annealing_warm_restarts",
      [](double learning_rate, std::uint64_t t_0, std::uint64_t t_mult, double eta_min) {
        return schedules::cosine_annealing_warm_restarts(
            {.learning_rate = learning_rate, .t_0 = t_0, .t_mult = t_mult, .eta_min = eta_min});
      },
      nb::kw_only(), "learning_rate"_a, "t_0"_a, "t_mult"_a = restarts.t_mult,
      "eta_min"_a = restarts.eta_min, "torch's CosineAnnealingWarmRestarts.");
  module.def(
      "one_cycle_lr",
      [](double max_lr, std::uint64_t total_steps, double pct_start, const std::string& strategy,
         double div_factor, double final_div_factor, bool three_phase) {
        return schedules::one_cycle_lr({.max_lr = max_lr,
                                        .total_steps = total_steps,
                                        .pct_start = pct_start,
                                        .strategy = from_name<schedules::anneal_strategy>(strategy),
                                        .div_factor = div_factor,
                                        .final_div_factor = final_div_factor,
                                        .three_phase = three_phase});
      },
      nb::kw_only(), "max_lr"_a, "total_steps"_a, "pct_start"_a = cycle.pct_start,
      "strategy"_a = to_name(cycle.strategy), "div_factor"_a = cycle.div_factor,
      "final_div_factor"_a = cycle.final_div_factor, "three_phase"_a = cycle.three_phase,
      "The learning rate of torch's OneCycleLR.");
}

}  // namespace

void bind_schedules(nb::module_& module) {
  nb::class_<schedule>(module, "Schedule",
                       "A learning rate or weight decay as a function of its clock, the updates "
                       "applied or the samples consumed before the step. A value: immutable, "
                       "comparable, picklable. Made by the functions of `schedules`.")
      .def(
          "value_at",
          [](const schedule& self, std::uint64_t clock) { return value_at(self, clock); },
          "clock"_a, "The value at `clock`, bit for bit what the device computes.")
      .def_prop_ro(
          "clock", [](const schedule& self) { return to_name(self.clock); },
          "What it counts: 'updates' or 'samples'.")
      .def(
          "__eq__", [](const schedule& self, const schedule& other) { return self == other; },
          "other"_a.none(), nb::is_operator())
      // Equal schedules have equal first values; that is hash enough for a handful of them.
      .def("__hash__", [](const schedule& self) { return nb::hash(nb::float_(value_at(self, 0))); })
      .def("__getstate__", &state_of)
      .def("__setstate__",
           [](schedule& self, const schedule_state& state) {
             new (&self) schedule(from_state(state));
           })
      .def("__repr__", [](const schedule& self) {
        return nb::str("<Schedule over {}, {} segment(s), {} at the start>")
            .format(to_name(self.clock), self.segments.size(), value_at(self, 0));
      });
  nb::module_ factories = module.def_submodule(
      "schedules", "Schedules that the step evaluates by itself, on the device.");
  bind_general(factories);
  bind_megatron(factories);
  bind_torch_decays(factories);
  bind_torch_cycles(factories);
}

}  // namespace stepgraph::python
