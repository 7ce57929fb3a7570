#include "loss_scaling.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "bindings.hpp"
#include "names.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stepgraph::python {
namespace {

constexpr double torch_initial = 65536.0;        // torch.amp.GradScaler's init_scale
constexpr double megatron_initial = 4294967296;  // Megatron-LM's --initial-loss-scale, 2^32

double usual_initial(loss_scale_rule rule) {
  switch (rule) {
    case loss_scale_rule::torch_amp:
      return torch_initial;
    case loss_scale_rule::megatron:
      return megatron_initial;
    case loss_scale_rule::fixed:
      break;
  }
  return 1.0;
}

loss_scaling_options make(loss_scale_rule rule, std::optional<double> initial,
                          std::uint32_t growth_interval, std::uint32_t hysteresis,
                          double growth_factor, double backoff_factor, double minimum) {
  loss_scaling_options made;
  made.scaling.rule = rule;
  made.scaling.growth_interval = growth_interval;
  made.scaling.hysteresis = hysteresis;
  made.scaling.growth_factor = growth_factor;
  made.scaling.backoff_factor = backoff_factor;
  made.scaling.minimum = minimum;
  made.initial = initial ? *initial : usual_initial(rule);
  return made;
}

/// All fields, in the order of the constructor.
using scaling_state =
    std::tuple<std::string, double, std::uint32_t, std::uint32_t, double, double, double>;

scaling_state state_of(const loss_scaling_options& self) {
  const loss_scaling& scaling = self.scaling;
  return {to_name(scaling.rule), self.initial,          scaling.growth_interval,
          scaling.hysteresis,    scaling.growth_factor, scaling.backoff_factor,
          scaling.minimum};
}

}  // namespace

void bind_loss_scaling(nb::module_& module) {
  constexpr loss_scaling torch;
  constexpr loss_scaling megatron = megatron_loss_scaling();
  nb::class_<loss_scaling_options>(
      module, "LossScaling",
      "How the loss scale reacts to gradients that are not finite, and where it starts: 1 for the "
      "rule 'fixed', torch.amp.GradScaler's 65536, Megatron-LM's 2^32. A value; judged by "
      "StepBuilder.set_options.")
      .def(
          "__init__",
          [](loss_scaling_options* self, const std::string& rule, std::optional<double> initial,
             std::uint32_t growth_interval, std::uint32_t hysteresis, double growth_factor,
             double backoff_factor, double minimum) {
            new (self) loss_scaling_options(make(from_name<loss_scale_rule>(rule), initial,
                                                 growth_interval, hysteresis, growth_factor,
                                                 backoff_factor, minimum));
          },
          "rule"_a = "torch_amp", nb::kw_only(), "initial"_a = nb::none(),
          "growth_interval"_a = torch.growth_interval, "hysteresis"_a = torch.hysteresis,
          "growth_factor"_a = torch.growth_factor, "backoff_factor"_a = torch.backoff_factor,
          "minimum"_a = torch.minimum)
      .def_static(
          "torch_amp",
          [](double initial, std::uint32_t growth_interval, double growth_factor,
             double backoff_factor) {
            return make(loss_scale_rule::torch_amp, initial, growth_interval, 1, growth_factor,
                        backoff_factor, 0.0);
          },
          "initial"_a = torch_initial, nb::kw_only(), "growth_interval"_a = torch.growth_interval,
          "growth_factor"_a = torch.growth_factor, "backoff_factor"_a = torch.backoff_factor,
          "The rule of torch.amp.GradScaler with its defaults.")
      .def_static(
          "megatron",
          [](double initial, std::uint32_t growth_interval, std::uint32_t hysteresis,
             double growth_factor, double backoff_factor, double minimum) {
            return make(loss_scale_rule::megatron, initial, growth_interval, hysteresis,
                        growth_factor, backoff_factor, minimum);
          },
          "initial"_a = megatron_initial, nb::kw_only(),
          "growth_interval"_a = megatron.growth_interval, "hysteresis"_a = megatron.hysteresis,
          "growth_factor"_a = megatron.growth_factor, "backoff_factor"_a = megatron.backoff_factor,
          "minimum"_a = megatron.minimum,
          "The rule of Megatron-LM's dynamic scaler with its defaults.")
      .def_prop_ro("rule",
                   [](const loss_scaling_options& self) { return to_name(self.scaling.rule); })
      .def_ro("initial", &loss_scaling_options::initial)
      .def_prop_ro("growth_interval",
                   [](const loss_scaling_options& self) { return self.scaling.growth_interval; })
      .def_prop_ro("hysteresis",
                   [](const loss_scaling_options& self) { return self.scaling.hysteresis; })
      .def_prop_ro("growth_factor",
                   [](const loss_scaling_options& self) { return self.scaling.growth_factor; })
      .def_prop_ro("backoff_factor",
                   [](const loss_scaling_options& self) { return self.scaling.backoff_factor; })
      .def_prop_ro("minimum", [](const loss_scaling_options& self) { return self.scaling.minimum; })
      .def(
          "__eq__",
          [](const loss_scaling_options& self, const loss_scaling_options& other) {
            return state_of(self) == state_of(other);
          },
          "other"_a.none(), nb::is_operator())
      .def("__hash__",
           [](const loss_scaling_options& self) { return nb::hash(nb::cast(state_of(self))); })
      .def("__getstate__", &state_of)
      .def("__setstate__",
           [](loss_scaling_options& self, const scaling_state& state) {
             const auto& [rule, initial, growth_interval, hysteresis, growth_factor, backoff_factor,
                          minimum] = state;
             new (&self) loss_scaling_options(make(from_name<loss_scale_rule>(rule), initial,
                                                   growth_interval, hysteresis, growth_factor,
                                                   backoff_factor, minimum));
           })
      .def("__repr__", [](const loss_scaling_options& self) {
        return nb::str(
                   "LossScaling('{}', initial={}, growth_interval={}, hysteresis={}, "
                   "growth_factor={}, backoff_factor={}, minimum={})")
            .format(to_name(self.scaling.rule), self.initial, self.scaling.growth_interval,
                    self.scaling.hysteresis, self.scaling.growth_factor,
                    self.scaling.backoff_factor, self.scaling.minimum);
      });
}

}  // namespace stepgraph::python
