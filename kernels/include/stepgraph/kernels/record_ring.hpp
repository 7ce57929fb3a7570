#pragma once

#include <cstdint>

#include "stepgraph/math/step_scalars.hpp"

/// The ring into which a step writes its record. It lies in memory that the host reads without
/// waiting (page-locked memory for a step on a device), so each slot says by itself whether it is
/// complete.
namespace stepgraph {

/// One record without its groups. Its `sequence` becomes 0 while the record before is written, and
/// the number of its launch once the rest is there, each in this order for every observer. A reader
/// that finds the number it expects before and after reading has the record.
struct record_slot {
  std::uint64_t sequence = 0;  ///< launches so far, this one included; 0: not written yet
  std::uint64_t reserved = 0;
  step_scalars scalars;  ///< after the launch
};

/// A ring of `capacity` slots, at least two. The record of launch n lies in slot (n - 1) %
/// capacity, the progress of its groups from element slot * group count on. Null: no records are
/// written.
struct record_ring_view {
  record_slot* slots = nullptr;
  group_progress* groups = nullptr;
  std::uint32_t capacity = 0;
};

}  // namespace stepgraph
