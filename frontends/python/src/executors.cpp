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
#include "executor_binding.hpp"
#include "names.hpp"
#include "records.hpp"
#include "stepgraph/host_executor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stepgraph::python {
namespace {

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  for (const auto& callback : nb::inst_ptr<executor_binding>(self)->callbacks()) {
    Py_VISIT(callback->callable().ptr());
  }
  return 0;
}

int clear(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  for (const auto& callback : nb::inst_ptr<executor_binding>(self)->callbacks()) callback->clear();
  return 0;
}

host_foreign_work host_callbacks(const callback_list& callbacks) {
  host_foreign_work work;
  for (const auto& callback : callbacks) work[callback->name()] = [callback] { (*callback)(); };
  return work;
}

class host_binding final : public executor_binding {
 public:
  host_binding(const step_plan& plan, callback_list given) : executor_binding(std::move(given)) {
    const nb::gil_scoped_release gil;
    executor_.emplace(plan, host_callbacks(callbacks()));
  }

  host_executor& core() override {
    if (!executor_) throw usage_error("the executor was released");
    return *executor_;
  }
  void release() override {
    // Setters look at the executor under the GIL alone.
    const nb::gil_scoped_acquire gil;
    executor_.reset();
  }
  const void* loss_scale_address() override { return core().loss_scale_address(); }
  const void* totals_address() override { return core().totals_address(); }

 private:
  std::optional<host_executor> executor_;
};

/// Tensor, operand, address, address of the scales.
using binding_tuple = std::tuple<tensor_id, std::string, std::uintptr_t, std::uintptr_t>;

void rebind(executor_binding& self, const std::vector<binding_tuple>& tuples) {
  std::vector<binding> bindings;
  bindings.reserve(tuples.size());
  for (const auto& [tensor, operand, address, scales] : tuples) {
    // Tensors know their device, and the package has compared it.
    bindings.push_back({tensor, from_name<operand_kind>(operand), reinterpret_cast<void*>(address),
                        reinterpret_cast<std::uint8_t*>(scales), true});
  }
  self.core().rebind(bindings);
}

void bind_setters(nb::class_<executor_binding>& type) {
  type.def(
          "set_learning_rate",
          [](executor_binding& self, group_id group, double value) {
            self.core().set_learning_rate(group, value);
          },
          "group"_a, "value"_a, "Holds over the group's schedule until it is resumed.")
      .def(
          "set_weight_decay",
          [](executor_binding& self, group_id group, double value) {
            self.core().set_weight_decay(group, value);
          },
          "group"_a, "value"_a, "Holds over the group's schedule until it is resumed.")
      .def(
          "set_betas",
          [](executor_binding& self, group_id group, double beta1, double beta2) {
            self.core().set_betas(group, beta1, beta2);
          },
          "group"_a, "beta1"_a, "beta2"_a)
      .def(
          "set_eps",
          [](executor_binding& self, group_id group, double value) {
            self.core().set_eps(group, value);
          },
          "group"_a, "value"_a)
      .def(
          "set_group_step",
          [](executor_binding& self, group_id group, std::uint64_t step) {
            self.core().set_group_step(group, step);
          },
          "group"_a, "step"_a, "The number of updates the group has applied.")
      .def(
          "set_step",
          [](executor_binding& self, std::uint64_t step) { self.core().set_step(step); }, "step"_a,
          "The number of steps applied, of all groups and the whole step.")
      .def(
          "set_loss_scale",
          [](executor_binding& self, double value) { self.core().set_loss_scale(value); },
          "value"_a, "The scale of the next step, rounded to f32; its counters stay.")
      .def(
          "set_max_grad_norm",
          [](executor_binding& self, double value) { self.core().set_max_grad_norm(value); },
          "value"_a, "0: no clipping. Refused unless the plan measures the gradients.")
      .def(
          "set_skip_above_norm",
          [](executor_binding& self, double value) { self.core().set_skip_above_norm(value); },
          "value"_a, "0: never. Refused unless the plan measures the gradients.")
      .def(
          "set_samples_per_step",
          [](executor_binding& self, std::uint64_t samples) {
            self.core().set_samples_per_step(samples);
          },
          "samples"_a)
      .def(
          "resume_schedule",
          [](executor_binding& self, group_id group) { self.core().resume_schedule(group); },
          "group"_a, "Gives the learning rate back to the group's schedule.")
      .def(
          "resume_weight_decay_schedule",
          [](executor_binding& self, group_id group) {
            self.core().resume_weight_decay_schedule(group);
          },
          "group"_a, "Gives the weight decay back to the group's schedule.")
      .def(
          "load_state",
          [](executor_binding& self, const python_status& state) {
            self.core().load_state(from_python(state));
          },
          "state"_a, "Restores counters, samples, loss scale and the steps of all groups.")
      .def("rebind", &rebind, "bindings"_a,
           "Points operands at other memory from the next launch on: (tensor, operand, address, "
           "address of the scales) each, in memory of the executor's device, which is not checked. "
           "All of them, or none if one is refused.")
      .def(
          "address_of",
          [](executor_binding& self, tensor_id tensor, const std::string& operand) {
            return reinterpret_cast<std::uintptr_t>(
                self.core().ledger().entry(tensor, from_name<operand_kind>(operand)).address);
          },
          "tensor"_a, "operand"_a, "Where the next launch finds the operand.");
}

void bind_base(nb::module_& module) {
  nb::class_<executor_binding> type(
      module, "Executor", nb::type_slots(executor_slots),
      "What the executors share: a plan, and the values that can be changed while it runs. Setters "
      "take effect at the next launch, in the order of launches; they neither wait nor touch a "
      "device.");
  type.def_prop_ro(
      "plan", [](executor_binding& self) { return step_plan(self.core().plan()); },
      "The plan it was built with or last updated to.");
  bind_setters(type);
  type.def(
          "recapture_required",
          [](executor_binding& self) { return self.core().recapture_required(); },
          "Why replays cannot be made right by re-binding alone, or None.")
      .def(
          "status",
          [](executor_binding& self) {
            return to_python(self.exclusively([&] { return self.core().status(); }));
          },
          "Where the step stands after all launches made so far; waits for them.")
      .def(
          "read_records",
          [](executor_binding& self) { return to_python(self.core().read_records()); },
          "The records of the steps that have finished since the last call; waits for nothing.")
      .def(
          "loss_scale_address",
          [](executor_binding& self) {
            return reinterpret_cast<std::uintptr_t>(self.loss_scale_address());
          },
          "Of one f32 where the step runs: the loss scale that the next step expects.")
      .def(
          "totals_address",
          [](executor_binding& self) {
            return reinterpret_cast<std::uintptr_t>(self.totals_address());
          },
          "Of one f64 for each norm group and one for the zeros: see exchange_totals.")
      .def(
          "release", [](executor_binding& self) { self.exclusively([&] { self.release(); }); },
          "Waits for the launches made so far and frees what the executor holds. What is called "
          "later raises UsageError; calling it again does nothing.");
}

}  // namespace

PyType_Slot executor_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                                {0, nullptr}};

void bind_executors(nb::module_& module) {
  bind_base(module);
  nb::class_<host_binding, executor_binding>(
      module, "HostExecutor", nb::type_slots(executor_slots),
      "Runs a plan on the processor, bit for bit what the CUDA executors compute.")
      .def(
          "__init__",
          [](host_binding* self, const step_plan& plan, const nb::object& foreign) {
            new (self) host_binding(plan, callbacks_from(foreign));
          },
          "plan"_a, "foreign"_a = nb::none(),
          "`foreign`: a callable of no arguments for each foreign node of the plan.")
      .def(
          "launch", [](host_binding& self) { self.exclusively([&] { self.core().launch(); }); },
          "Runs one step; returns when it is done. Releases the GIL.")
      .def(
          "update",
          [](host_binding& self, const step_plan& plan, const nb::object& foreign) {
            callback_list given = callbacks_from(foreign);
            update_report report = self.exclusively([&] {
              return self.core().update(
                  plan, foreign.is_none() ? std::nullopt : std::optional(host_callbacks(given)));
            });
            if (!foreign.is_none()) self.callbacks().swap(given);
            return report;
          },
          "plan"_a, "foreign"_a = nb::none(), "Goes on with another plan.");
}

}  // namespace stepgraph::python
