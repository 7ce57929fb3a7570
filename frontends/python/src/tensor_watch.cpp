#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "executor_binding.hpp"
#include "stepgraph/error.hpp"
#include "tensor_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stepgraph::python {
namespace {

/// Finds out which parameters or gradients are not where they were.
class tensor_watch {
 public:
  tensor_watch(const nb::sequence& parameters, const std::vector<std::string>& attributes,
               const std::vector<bool>& wrapped)
      : local_tensor_(interned("_local_tensor")) {
    for (const nb::handle parameter : parameters) {
      entry each;
      each.parameter = nb::borrow(parameter);
      entries_.push_back(std::move(each));
    }
    if (attributes.size() != entries_.size() || wrapped.size() != entries_.size()) {
      throw usage_error("TensorWatch: " + std::to_string(entries_.size()) + " parameters, " +
                        std::to_string(attributes.size()) + " gradient attributes and " +
                        std::to_string(wrapped.size()) +
                        " entries of wrapped, expected as many of each");
    }
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      entries_[i].alone = attributes[i].empty();
      if (attributes[i] != "grad") entries_[i].attribute = interned(attributes[i].c_str());
      entries_[i].wrapped = wrapped[i];
    }
  }

  nb::list changed() const {
    nb::list indices;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const entry& each = entries_[i];
      if (!parameter_place(each).same_as(each.noted_parameter) ||
          !gradient_place(each).same_as(each.noted_gradient)) {
        indices.append(i);
      }
    }
    return indices;
  }

  /// Gradients in other memory that are otherwise as noted are re-bound and noted: how many, and
  /// the indices of all other changes. Every backward makes new gradients where the old ones were
  /// dropped, so this is every step of such a training.
  std::pair<std::size_t, nb::list> rebind_gradients(executor_binding& executor) {
    nb::list indices;
    std::vector<binding> bindings;
    std::vector<std::pair<std::size_t, tensor_place>> moved;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const entry& each = entries_[i];
      tensor_place gradient = gradient_place(each);
      const bool stays = gradient.same_as(each.noted_gradient);
      if (!stays && gradient.layout == 0) gradient = gradient_place(each, true);
      if (!parameter_place(each).same_as(each.noted_parameter) ||
          (!stays && (each.tensor < 0 || !gradient.moved_from(each.noted_gradient)))) {
        indices.append(i);
      } else if (!stays) {
        bindings.push_back({static_cast<tensor_id>(each.tensor), operand_kind::gradient,
                            reinterpret_cast<void*>(gradient.address), nullptr, true});
        moved.emplace_back(i, gradient);
      }
    }
    if (!bindings.empty()) executor.core().rebind(bindings);
    for (const auto& [i, gradient] : moved) entries_[i].noted_gradient = gradient;
    return {moved.size(), indices};
  }

  void accept(const std::vector<std::int64_t>& tensors) {
    if (!tensors.empty() && tensors.size() != entries_.size()) {
      throw usage_error("TensorWatch: " + std::to_string(tensors.size()) +
                        " tensors, expected one for each of the " +
                        std::to_string(entries_.size()) + " parameters");
    }
    // All first: reading may run Python code that raises.
    std::vector<std::pair<tensor_place, tensor_place>> places;
    places.reserve(entries_.size());
    for (const entry& each : entries_) {
      places.emplace_back(parameter_place(each), gradient_place(each, true));
    }
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      entries_[i].noted_parameter = places[i].first;
      entries_[i].noted_gradient = places[i].second;
      if (!tensors.empty()) entries_[i].tensor = tensors[i];
    }
  }

  int traverse(visitproc visit, void* arg) const {
    for (const entry& each : entries_) Py_VISIT(each.parameter.ptr());
    return 0;
  }
  void clear() {
    std::vector<entry> gone;
    gone.swap(entries_);
  }

 private:
  struct entry {
    nb::object parameter;
    nb::object attribute;  ///< that holds the gradient; null: `grad`
    bool wrapped = false;
    bool alone = false;        ///< without a gradient to watch
    std::int64_t tensor = -1;  ///< in the plan of the executor; negative: not there
    tensor_place noted_parameter;
    tensor_place noted_gradient;
  };

  static nb::object interned(const char* text) {
    return nb::steal(PyUnicode_InternFromString(text));
  }

  /// The tensor of this process that a DTensor wraps.
  nb::object local(nb::handle tensor) const {
    const nb::object inner = nb::steal(PyObject_GetAttr(tensor.ptr(), local_tensor_.ptr()));
    if (!inner.is_valid()) nb::raise_python_error();
    return inner;
  }

  tensor_place parameter_place(const entry& of) const {
    return of.wrapped ? reader_.read(local(of.parameter)) : reader_.read(of.parameter);
  }

  nb::object gradient_of(const entry& of) const {
    if (!of.attribute.is_valid()) return reader_.gradient_of(of.parameter);
    nb::object gradient = nb::steal(PyObject_GetAttr(of.parameter.ptr(), of.attribute.ptr()));
    if (gradient.is_valid()) return gradient;
    // `decoupled_grad` of a parameter that never had one.
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) nb::raise_python_error();
    PyErr_Clear();
    return nb::none();
  }

  tensor_place gradient_place(const entry& of, bool with_layout = false) const {
    if (of.alone) return reader_.read(nb::none());
    const nb::object gradient = gradient_of(of);
    return of.wrapped && !gradient.is_none() ? reader_.read(local(gradient), with_layout)
                                             : reader_.read(gradient, with_layout);
  }

  tensor_reader reader_;
  nb::object local_tensor_;
  std::vector<entry> entries_;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<tensor_watch>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<tensor_watch>(self)->clear();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                       {0, nullptr}};

}  // namespace

void bind_tensor_watch(nb::module_& module) {
  nb::class_<tensor_watch>(
      module, "TensorWatch", nb::type_slots(slots),
      "Finds out fast which parameters or gradients moved. Holds on to the parameters, not to the "
      "gradients. gradient_attributes: 'grad' or 'decoupled_grad' of each, '' for tensors that "
      "have none to watch; wrapped: the parameter and its gradient are DTensors, whose "
      "_local_tensor is meant.")
      .def(nb::init<const nb::sequence&, const std::vector<std::string>&,
                    const std::vector<bool>&>(),
           "parameters"_a, "gradient_attributes"_a, "wrapped"_a)
      .def("changed", &tensor_watch::changed,
           "Indices whose parameter or gradient has another address, element type, element count, "
           "contiguity or presence than accept() noted, or cannot be read. All before the first "
           "accept().")
      .def("rebind_gradients", &tensor_watch::rebind_gradients, "executor"_a,
           "Re-binds, from the next launch on, and notes the gradients that differ from what was "
           "noted by their address alone. Returns how many, and the indices of all other changes, "
           "which it leaves alone.")
      .def("accept", &tensor_watch::accept, "tensors"_a = std::vector<std::int64_t>(),
           "Notes what is there now. tensors: the number of each parameter in the plan, negative "
           "for those that are not in it; without it the numbers stay.");
}

}  // namespace stepgraph::python
