#pragma once

#include <cstdint>
#include <memory>

#include "random_values.hpp"
#include "stepgraph/tensor_view.hpp"

namespace stepgraph::perf {

/// Memory of a benchmark's own, on the host or on a device.
using operand_memory = std::unique_ptr<void, void (*)(void*)>;

/// `elements` random elements at `location`. Throws when memory is short. On a device, filled in
/// the order of the default stream.
operand_memory random_operand(storage_format format, std::uint64_t elements,
                              const random_range& range, device_location location);

/// `bytes` bytes of one value at `location`, likewise.
operand_memory constant_operand(std::uint8_t value, std::uint64_t bytes, device_location location);

}  // namespace stepgraph::perf
