#include "records.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>

#include "bindings.hpp"
#include "names.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stepgraph::python {
namespace {

void bind_groups(nb::module_& module) {
  nb::class_<group_status>(module, "GroupStatus", "Where one group stands.")
      .def(
          "__init__",
          [](group_status* self, std::uint64_t step, double learning_rate, double weight_decay) {
            new (self) group_status{step, learning_rate, weight_decay};
          },
          "step"_a = 0, "learning_rate"_a = 0.0, "weight_decay"_a = 0.0)
      .def_rw("step", &group_status::step, "Updates applied.")
      .def_rw("learning_rate", &group_status::learning_rate, "Of the latest applied update.")
      .def_rw("weight_decay", &group_status::weight_decay, "Of the latest applied update.")
      .def("__repr__", [](const group_status& self) {
        return nb::str("GroupStatus(step={}, learning_rate={}, weight_decay={})")
            .format(self.step, self.learning_rate, self.weight_decay);
      });
}

template <class Value>
void bind_value(nb::class_<python_status>& type, const char* name, Value step_status::*member,
                const char* text) {
  type.def_prop_rw(
      name, [member](const python_status& self) { return self.values.*member; },
      [member](python_status& self, Value value) { self.values.*member = value; }, text);
}

template <class Value>
void bind_scale_value(nb::class_<python_status>& type, const char* name,
                      Value loss_scale_state::*member, const char* text) {
  type.def_prop_rw(
      name, [member](const python_status& self) { return self.values.next_loss_scale.*member; },
      [member](python_status& self, Value value) { self.values.next_loss_scale.*member = value; },
      text);
}

void bind_status(nb::module_& module) {
  nb::class_<python_status> status(
      module, "StepStatus",
      "Where the step stands. What an executor reads back, or what load_state restores.");
  status.def(nb::init<>());
  bind_value(status, "step", &step_status::step, "Steps applied.");
  bind_value(status, "skipped", &step_status::skipped, "Steps skipped.");
  bind_value(status, "samples", &step_status::samples, "Consumed by the applied steps.");
  bind_value(status, "last_skipped", &step_status::last_skipped, "The latest step was skipped.");
  bind_value(status, "found_inf", &step_status::found_inf,
             "In the latest step a gradient was not finite, or the input said so.");
  bind_value(status, "grad_norm", &step_status::grad_norm,
             "Global norm of the latest step's unscaled gradient before clipping; 0 if the plan "
             "does not measure it.");
  status.def_rw("norms", &python_status::norms, "Of each norm group, likewise.");
  bind_value(status, "zeros", &step_status::zeros,
             "Gradient elements that are zero, if the plan counts them.");
  bind_value(status, "clip_coefficient", &step_status::clip_coefficient, "Of the latest step.");
  bind_value(status, "loss_scale", &step_status::loss_scale, "Of the latest step.");
  bind_scale_value(status, "next_loss_scale", &loss_scale_state::scale, "Of the next step.");
  bind_scale_value(status, "growth_tracker", &loss_scale_state::growth_tracker,
                   "Finite steps in a row.");
  bind_scale_value(status, "hysteresis_left", &loss_scale_state::hysteresis_left,
                   "Bad steps left before the scale shrinks.");
  status.def_rw("groups", &python_status::groups, "A GroupStatus of each group.");
  status.def("__repr__", [](const python_status& self) {
    return nb::str(
               "StepStatus(step={}, skipped={}, samples={}, grad_norm={}, loss_scale={}, "
               "next_loss_scale={}, groups={})")
        .format(self.values.step, self.values.skipped, self.values.samples, self.values.grad_norm,
                self.values.loss_scale, self.values.next_loss_scale.scale, self.groups);
  });
}

template <class Value>
void bind_value(nb::class_<python_record>& type, const char* name, Value step_record::*member,
                const char* text) {
  type.def_prop_ro(
      name, [member](const python_record& self) { return self.values.*member; }, text);
}

void bind_record(nb::module_& module) {
  nb::class_<python_record> record(module, "StepRecord",
                                   "What a step says about itself, applied or skipped.");
  bind_value(record, "launch", &step_record::launch, "Launches so far, this one included.");
  bind_value(record, "step", &step_record::step, "Steps applied so far.");
  bind_value(record, "skipped", &step_record::skipped, "Steps skipped so far.");
  bind_value(record, "samples", &step_record::samples, "Consumed by the applied steps so far.");
  bind_value(record, "was_skipped", &step_record::was_skipped, "This step was.");
  bind_value(record, "found_inf", &step_record::found_inf,
             "A gradient was not finite, or the input said so.");
  bind_value(record, "grad_norm", &step_record::grad_norm,
             "Global norm of the unscaled gradient before clipping; 0 if it is not measured.");
  bind_value(record, "clip_coefficient", &step_record::clip_coefficient, "");
  bind_value(record, "loss_scale", &step_record::loss_scale, "");
  bind_value(record, "zeros", &step_record::zeros,
             "Gradient elements that are zero, if the plan counts them.");
  record.def_ro("groups", &python_record::groups, "A GroupStatus of each group.");
  record.def("__repr__", [](const python_record& self) {
    return nb::str("<StepRecord: launch {}, step {}, skipped {}, grad_norm {}, loss_scale {}>")
        .format(self.values.launch, self.values.step, self.values.skipped, self.values.grad_norm,
                self.values.loss_scale);
  });
  nb::class_<python_batch>(module, "RecordBatch", "Records in the order of their launches.")
      .def_ro("records", &python_batch::records)
      .def_ro("overwritten", &python_batch::overwritten,
              "Records lost since the last batch: the ring was full.");
}

void bind_report(nb::module_& module) {
  nb::class_<update_report>(module, "UpdateReport", "What an update did and why.")
      .def_prop_ro(
          "path", [](const update_report& self) { return to_name(self.path); },
          "The dearest path that was needed, from 'nothing' to 'instantiate'.")
      .def_ro("reasons", &update_report::reasons,
              "What differs between the plans, and what the driver refused on the way.")
      .def_prop_ro(
          "counts",
          [](const update_report& self) {
            nb::dict counts;
            counts["scalars_written"] = self.counts.scalars_written;
            counts["tables_written"] = self.counts.tables_written;
            counts["nodes_updated"] = self.counts.nodes_updated;
            counts["graph_updates"] = self.counts.graph_updates;
            counts["graph_updates_refused"] = self.counts.graph_updates_refused;
            counts["instantiations"] = self.counts.instantiations;
            return counts;
          },
          "How often it did what, by name.")
      .def_ro("rebuilt", &update_report::rebuilt,
              "The step lies in other memory: its addresses have changed, and graphs that captured "
              "a launch before must not be replayed.")
      .def_ro("seconds", &update_report::seconds, "On the host, waiting included.")
      .def("__repr__", [](const update_report& self) {
        return nb::str("<UpdateReport: {}, {}>").format(to_name(self.path), self.reasons);
      });
}

}  // namespace

python_status to_python(step_status status) {
  python_status made;
  for (const double norm : status.norms) made.norms.append(norm);
  for (const group_status& group : status.groups) made.groups.append(group);
  made.values = std::move(status);
  return made;
}

python_batch to_python(const record_batch& batch) {
  python_batch made;
  made.overwritten = batch.overwritten;
  for (const step_record& record : batch.records) {
    python_record one;
    one.values = record;
    for (const group_record& group : record.groups) {
      one.groups.append(group_status{group.step, group.learning_rate, group.weight_decay});
    }
    made.records.append(std::move(one));
  }
  return made;
}

step_status from_python(const python_status& status) {
  step_status made = status.values;
  made.norms.clear();
  made.groups.clear();
  for (const nb::handle group : status.groups) made.groups.push_back(nb::cast<group_status>(group));
  return made;
}

void bind_records(nb::module_& module) {
  bind_groups(module);
  bind_status(module);
  bind_record(module);
  bind_report(module);
}

}  // namespace stepgraph::python
