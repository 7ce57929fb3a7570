#pragma once

#include <cstdint>
#include <string>

#include "stepgraph/math/storage_format.hpp"

namespace stepgraph {

enum class device_kind : std::uint8_t { host, cuda };

/// Where memory lives.
struct device_location {
  device_kind kind = device_kind::host;
  int index = 0;  ///< CUDA device ordinal; 0 for the host

  bool operator==(const device_location&) const = default;
};

/// "host" or "cuda:<index>".
std::string name_of(device_location location);

/// A dense, contiguous tensor that somebody else owns. Its shape does not matter to an optimizer
/// step; its element count does.
struct tensor_view {
  void* data = nullptr;     ///< aligned to the element size; may be null when numel is 0
  std::uint64_t numel = 0;  ///< elements
  storage_format format = storage_format::f32;
  device_location device = {};
  /// Of a block-scaled master or moment (f16, e4m3): scale_count(numel) bytes on the same device,
  /// each 127 + the exponent of the power of two that multiplies 128 consecutive elements. A state
  /// that starts at zero may start with any scales.
  std::uint8_t* scales = nullptr;
};

}  // namespace stepgraph
