#include <exception>

#include "bindings.hpp"
#include "stepgraph/error.hpp"

namespace nb = nanobind;

namespace stepgraph::python {
namespace {

/// The exception types, made once for the process and never freed, as the module itself.
struct error_types {
  PyObject* error = nullptr;
  PyObject* usage = nullptr;
  PyObject* cuda = nullptr;
  PyObject* capture = nullptr;
  PyObject* update = nullptr;
};
error_types types;

PyObject* make_type(nb::module_& module, const char* name, const char* text, nb::handle bases) {
  // Under the package's name: that is where users catch them and where pickle looks.
  const nb::str qualified = nb::str("stepgraph.{}").format(name);
  PyObject* const type =
      PyErr_NewExceptionWithDoc(qualified.c_str(), text, bases.ptr(), /*dict=*/nullptr);
  if (type == nullptr) nb::raise_python_error();
  module.attr(name) = nb::handle(type);
  return type;
}

void set_cuda_error(const cuda_error& failure) {
  const nb::object value = nb::handle(types.cuda)(failure.what());
  value.attr("status") = failure.status();
  PyErr_SetObject(types.cuda, value.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const usage_error& failure) {
    PyErr_SetString(types.usage, failure.what());
  } catch (const cuda_error& failure) {
    set_cuda_error(failure);
  } catch (const capture_error& failure) {
    PyErr_SetString(types.capture, failure.what());
  } catch (const update_error& failure) {
    PyErr_SetString(types.update, failure.what());
  } catch (const error& failure) {
    PyErr_SetString(types.error, failure.what());
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  types.error = make_type(module, "Error",
                          "Base of everything that stepgraph raises by itself. After any of them "
                          "the optimizer and the process stay usable.",
                          PyExc_RuntimeError);
  const nb::handle error(types.error);
  types.usage =
      make_type(module, "UsageError",
                "A request that cannot be served as asked. The message names the tensor, option or "
                "group, what was expected and what was found; nothing was changed.",
                nb::make_tuple(error, nb::handle(PyExc_ValueError)));
  types.cuda =
      make_type(module, "CudaError", "A CUDA call failed; `status` is its cudaError_t.", error);
  nb::handle(types.cuda).attr("status") = 0;
  types.capture = make_type(module, "CaptureError",
                            "A stream capture was refused, invalidated or left empty.", error);
  types.update = make_type(
      module, "UpdateError",
      "A change to an instantiated graph was refused; the graph still runs as before.", error);
  nb::register_exception_translator(translate);
}

}  // namespace stepgraph::python
