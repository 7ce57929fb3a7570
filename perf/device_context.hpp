#pragma once

#include "stepgraph/tensor_view.hpp"

namespace stepgraph::perf {

/// Adds what `add_host_context` adds, the device's name and the versions of the driver and of CUDA
/// to the context. False, with a message on stderr, when there is no usable device.
bool add_device_context();

/// The device the benchmarks run on: the current one.
device_location current_device();

}  // namespace stepgraph::perf
