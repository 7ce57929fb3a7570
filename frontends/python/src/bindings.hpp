#pragma once

#include <nanobind/nanobind.h>

/// The parts of the module, one a source file. Each adds its classes and functions; a part comes
/// after those whose classes its signatures name.
namespace stepgraph::python {

void bind_errors(nanobind::module_& module);
void bind_schedules(nanobind::module_& module);
void bind_loss_scaling(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_records(nanobind::module_& module);
void bind_executors(nanobind::module_& module);
void bind_cuda_executors(nanobind::module_& module);
void bind_tensor_watch(nanobind::module_& module);
void bind_block_scaled(nanobind::module_& module);

}  // namespace stepgraph::python
