#include "python_callback.hpp"

namespace nb = nanobind;

namespace stepgraph::python {

python_callback::~python_callback() {
  if (!callable_) return;
  // An executor that outlives the interpreter has nothing to give back to.
  if (!nb::is_alive()) {
    static_cast<void>(callable_.release());
    return;
  }
  const nb::gil_scoped_acquire gil;
  callable_.reset();
}

callback_list callbacks_from(const nb::object& foreign) {
  callback_list made;
  if (foreign.is_none()) return made;
  nb::dict by_name;
  by_name.update(foreign);
  for (const auto [name, callable] : by_name) {
    const nb::str shown(name);
    const std::string text = shown.c_str();
    if (PyCallable_Check(callable.ptr()) == 0) {
      throw nb::type_error(("foreign work '" + text + "': expected a callable").c_str());
    }
    made.push_back(std::make_shared<python_callback>(text, nb::borrow(callable)));
  }
  return made;
}

}  // namespace stepgraph::python
