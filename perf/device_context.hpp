#pragma once

namespace stepgraph::perf {

/// Adds the device's name, the driver's version and the source revision to the benchmark's context,
/// which ends up in its JSON. False, with a message on stderr, when there is no usable device.
bool add_device_context();

}  // namespace stepgraph::perf
