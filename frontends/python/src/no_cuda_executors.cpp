#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "executor_binding.hpp"

namespace nb = nanobind;

namespace stepgraph::python {
namespace {

/// Stands where a CUDA executor would, so that what is missing is said instead of misspelt.
class absent_executor : public executor_binding {};
class absent_stream_executor final : public absent_executor {};
class absent_graph_executor final : public absent_executor {};

[[noreturn]] void refuse(const nb::handle&, const nb::args&, const nb::kwargs&) {
  throw usage_error(
      "this build of stepgraph has no CUDA executors (stepgraph.HAS_CUDA is False): expected "
      "tensors on the CPU, or a build with a CUDA toolkit");
}

template <class Absent>
void bind(nb::module_& module, const char* name) {
  nb::class_<Absent, executor_binding>(module, name, "Not in this build: raises UsageError.")
      .def("__init__", &refuse);
}

}  // namespace

void bind_cuda_executors(nb::module_& module) {
  bind<absent_stream_executor>(module, "StreamExecutor");
  bind<absent_graph_executor>(module, "GraphExecutor");
}

}  // namespace stepgraph::python
