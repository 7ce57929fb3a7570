#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "loss_scaling.hpp"
#include "names.hpp"
#include "stepgraph/step_builder.hpp"
#include "stepgraph/step_plan.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stepgraph::python {
namespace {

/// Address, format, address of the block scales (0: none).
using operand = std::tuple<std::uintptr_t, std::string, std::uintptr_t>;
/// Addresses of scale, amax and scale_inv.
using scaling_addresses = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t>;

template <class Pointee>
Pointee* pointer(std::uintptr_t address) {
  return reinterpret_cast<Pointee*>(address);
}

device_location location_of(int device) {
  if (device < 0) return {};
  return {device_kind::cuda, device};
}

tensor_view view_of(const operand& described, std::uint64_t numel, int device) {
  const auto& [address, format, scales] = described;
  return {.data = pointer<void>(address),
          .numel = numel,
          .format = from_name<storage_format>(format),
          .device = location_of(device),
          .scales = pointer<std::uint8_t>(scales)};
}

std::optional<tensor_view> view_of(const std::optional<operand>& described, std::uint64_t numel,
                                   int device) {
  if (!described) return std::nullopt;
  return view_of(*described, numel, device);
}

group_id add_group(step_builder& self, const std::string& name, double learning_rate, double beta1,
                   double beta2, double eps, double weight_decay, bool decoupled,
                   bool bias_correction, bool maximize,
                   const std::optional<schedule>& learning_rate_schedule,
                   const std::optional<schedule>& weight_decay_schedule, std::uint64_t step,
                   const std::string& norm_group, std::uintptr_t learning_rate_input,
                   std::uintptr_t weight_decay_input) {
  return self.add_group({.name = name,
                         .learning_rate = learning_rate,
                         .beta1 = beta1,
                         .beta2 = beta2,
                         .eps = eps,
                         .weight_decay = weight_decay,
                         .mode = decoupled ? weight_decay_mode::decoupled : weight_decay_mode::l2,
                         .bias_correction = bias_correction,
                         .maximize = maximize,
                         .learning_rate_schedule = learning_rate_schedule,
                         .weight_decay_schedule = weight_decay_schedule,
                         .step = step,
                         .norm_group = norm_group,
                         .learning_rate_input = pointer<const float>(learning_rate_input),
                         .weight_decay_input = pointer<const float>(weight_decay_input)});
}

tensor_id add_tensor(step_builder& self, group_id group, const std::string& name,
                     std::uint64_t numel, int device, const operand& parameter,
                     const std::optional<operand>& gradient, const operand& exp_avg,
                     const operand& exp_avg_sq, const std::optional<operand>& master,
                     const std::optional<operand>& max_exp_avg_sq,
                     const std::optional<scaling_addresses>& parameter_scaling) {
  tensor_operands operands = {.name = name,
                              .parameter = view_of(parameter, numel, device),
                              .gradient = view_of(gradient, numel, device),
                              .master = view_of(master, numel, device),
                              .exp_avg = view_of(exp_avg, numel, device),
                              .exp_avg_sq = view_of(exp_avg_sq, numel, device),
                              .max_exp_avg_sq = view_of(max_exp_avg_sq, numel, device)};
  if (parameter_scaling) {
    const auto& [scale, amax, scale_inv] = *parameter_scaling;
    operands.parameter_scaling = {.scale = pointer<const float>(scale),
                                  .amax = pointer<float>(amax),
                                  .scale_inv = pointer<float>(scale_inv)};
  }
  return self.add_tensor(group, std::move(operands));
}

tensor_id add_gradient(step_builder& self, group_id group, const std::string& name,
                       std::uint64_t numel, int device, const operand& gradient) {
  return self.add_gradient(group, name, view_of(gradient, numel, device));
}

void set_options(step_builder& self, bool skip_non_finite, double max_grad_norm,
                 double skip_above_norm, const std::string& norm, bool measure_norm,
                 bool count_zeros, double loss_scale,
                 const std::optional<loss_scaling_options>& scaling, bool zero_gradients,
                 bool unscale_gradients, std::uintptr_t found_inf_input,
                 std::uintptr_t loss_scale_input, bool exchange_totals,
                 std::uint64_t samples_per_step, std::uint32_t record_capacity,
                 bool stochastic_rounding, std::uint64_t seed) {
  if (scaling && loss_scale != 1.0) {
    throw usage_error(
        "loss_scale and scaling were both given, expected one: `scaling.initial` is the scale to "
        "start from");
  }
  self.set_options({.skip_non_finite = skip_non_finite,
                    .max_grad_norm = max_grad_norm,
                    .skip_above_norm = skip_above_norm,
                    .norm = from_name<norm_kind>(norm),
                    .measure_norm = measure_norm,
                    .count_zeros = count_zeros,
                    .loss_scale = scaling ? scaling->initial : loss_scale,
                    .scaling = scaling ? scaling->scaling : loss_scaling{},
                    .zero_gradients = zero_gradients,
                    .unscale_gradients = unscale_gradients,
                    .found_inf_input = pointer<const float>(found_inf_input),
                    .loss_scale_input = pointer<const float>(loss_scale_input),
                    .exchange_totals = exchange_totals,
                    .samples_per_step = samples_per_step,
                    .record_capacity = record_capacity,
                    .stochastic_rounding = stochastic_rounding,
                    .seed = seed});
}

nb::list nodes_of(const step_plan& self) {
  nb::list nodes;
  for (const plan_node& node : self.nodes) {
    nb::dict described;
    described["name"] = node.name;
    described["kind"] = to_name(node.kind);
    described["tensors"] = node.tensors;
    described["chunks"] = node.chunks;
    described["blocks"] = node.blocks;
    described["threads"] = node.threads;
    described["bytes_read"] = node.bytes_read;
    described["bytes_written"] = node.bytes_written;
    described["only_if_applied"] = node.only_if_applied;
    nodes.append(described);
  }
  return nodes;
}

std::vector<std::string> tensor_names(const step_plan& self) {
  std::vector<std::string> names;
  names.reserve(self.tensors.size());
  for (const plan_tensor& tensor : self.tensors) names.push_back(tensor.operands.name);
  return names;
}

void bind_builder(nb::module_& module) {
  const group_options group;
  const step_options step;
  nb::class_<step_builder>(
      module, "StepBuilder",
      "Collects groups and tensors and checks them. Addresses are integers "
      "(0: none) of memory that must outlive the executor's use of it; formats "
      "are 'f32', 'f16', 'bf16', 'e4m3', 'e5m2', 'remainder'; device is -1 for "
      "the host, else a CUDA ordinal. A call that raises leaves the builder as "
      "it was.")
      .def(nb::init<>())
      .def("add_group", &add_group, nb::kw_only(), "name"_a = group.name,
           "learning_rate"_a = group.learning_rate, "beta1"_a = group.beta1,
           "beta2"_a = group.beta2, "eps"_a = group.eps, "weight_decay"_a = group.weight_decay,
           "decoupled"_a = true, "bias_correction"_a = group.bias_correction,
           "maximize"_a = group.maximize, "learning_rate_schedule"_a = nb::none(),
           "weight_decay_schedule"_a = nb::none(), "step"_a = group.step,
           "norm_group"_a = group.norm_group, "learning_rate_input"_a = 0,
           "weight_decay_input"_a = 0,
           "Adds a group and returns its index. `decoupled`: AdamW, else L2. `step`: updates "
           "applied already. The inputs are addresses of one f32 beside the tensors that every "
           "step reads instead.")
      .def("add_tensor", &add_tensor, "group"_a, nb::kw_only(), "name"_a, "numel"_a, "device"_a,
           "parameter"_a, "gradient"_a.none(), "exp_avg"_a, "exp_avg_sq"_a, "master"_a = nb::none(),
           "max_exp_avg_sq"_a = nb::none(), "parameter_scaling"_a = nb::none(),
           "Adds a tensor of `numel` elements and returns its index. `parameter_scaling`: "
           "addresses of scale, amax and scale_inv of an 8-bit parameter.")
      .def("add_gradient", &add_gradient, "group"_a, nb::kw_only(), "name"_a, "numel"_a, "device"_a,
           "gradient"_a, "Adds a gradient without a parameter, for the norm and for unscaling.")
      .def("set_options", &set_options, nb::kw_only(), "skip_non_finite"_a = step.skip_non_finite,
           "max_grad_norm"_a = step.max_grad_norm, "skip_above_norm"_a = step.skip_above_norm,
           "norm"_a = to_name(step.norm), "measure_norm"_a = step.measure_norm,
           "count_zeros"_a = step.count_zeros, "loss_scale"_a = step.loss_scale,
           "scaling"_a = nb::none(), "zero_gradients"_a = step.zero_gradients,
           "unscale_gradients"_a = step.unscale_gradients, "found_inf_input"_a = 0,
           "loss_scale_input"_a = 0, "exchange_totals"_a = step.exchange_totals,
           "samples_per_step"_a = step.samples_per_step, "record_capacity"_a = step.record_capacity,
           "stochastic_rounding"_a = step.stochastic_rounding, "seed"_a = step.seed,
           "Options of the step as a whole. `scaling` brings its own scale to start from.")
      .def(
          "add_foreign_work",
          [](step_builder& self, const std::string& name, const std::string& node,
             const std::string& when, bool only_if_applied) {
            self.add_foreign_work({.name = name,
                                   .when = from_name<foreign_order>(when),
                                   .node = node,
                                   .only_if_applied = only_if_applied});
          },
          "name"_a, "node"_a, "when"_a = "after", "only_if_applied"_a = false,
          "A place for work of the caller's beside a node of the step; executors get the callback "
          "by its name.")
      .def("build", &step_builder::build, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<step_plan>(module, "Plan",
                        "A whole step as plain data. Borrows the memory of the tensors.")
      .def("nodes", &nodes_of, "What runs, in order: name, kind, tensors, launch sizes, bytes.")
      .def(
          "to_dot", [](const step_plan& self) { return to_dot(self); }, "A Graphviz digraph.")
      .def_prop_ro("tensors", &tensor_names, "Their names, in the order of their indices.")
      .def_prop_ro(
          "groups",
          [](const step_plan& self) {
            std::vector<std::string> names;
            for (const group_options& group : self.groups) names.push_back(group.name);
            return names;
          },
          "Their names, in the order of their indices.")
      .def_prop_ro(
          "norm_groups", [](const step_plan& self) { return self.norm_groups; },
          "Their names, in the order of StepStatus.norms.");
  bind_builder(module);
}

}  // namespace stepgraph::python
