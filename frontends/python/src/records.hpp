#pragma once

#include <nanobind/nanobind.h>

#include "stepgraph/executor.hpp"
#include "stepgraph/step_record.hpp"
#include "stepgraph/update_report.hpp"

/// Results of executors as Python sees them. Lists are Python's own, so that what is assigned to an
/// element of them stays.
namespace stepgraph::python {

struct python_status {
  step_status values;  ///< its lists are unused
  nanobind::list norms;
  nanobind::list groups;  ///< of group_status
};

struct python_record {
  step_record values;     ///< its list is unused
  nanobind::list groups;  ///< of group_status
};

struct python_batch {
  nanobind::list records;
  std::uint64_t overwritten = 0;
};

python_status to_python(step_status status);
python_batch to_python(const record_batch& batch);
/// Throws what nanobind throws if an element of a list has another type.
step_status from_python(const python_status& status);

}  // namespace stepgraph::python
