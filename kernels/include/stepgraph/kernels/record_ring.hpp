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
struct alignas(16) record_slot {
  std::uint64_t sequence = 0;  ///< launches so far, this one included; 0: not written yet
  std::uint64_t step = 0;      ///< steps applied so far
  std::uint64_t skipped = 0;   ///< steps skipped so far
  std::uint64_t samples = 0;
  std::uint64_t zeros = 0;
  double grad_norm = 0.0;
  float loss_scale = 1.0f;
  float clip_coefficient = 1.0f;
  std::uint32_t skip = 0;
  std::uint32_t found_inf = 0;
};

/// What one group adds to a record.
struct record_group {
  std::uint64_t step = 0;
  double learning_rate = 0.0;
  double weight_decay = 0.0;
};

/// Everything of a record but its sequence and its groups.
STEPGRAPH_HOST_DEVICE void fill_record(const step_scalars& scalars, record_slot& slot) {
  slot.step = scalars.step;
  slot.skipped = scalars.skipped;
  slot.samples = scalars.samples;
  slot.zeros = scalars.zeros;
  slot.grad_norm = scalars.grad_norm;
  slot.loss_scale = scalars.loss_scale;
  slot.clip_coefficient = scalars.clip_coefficient;
  slot.skip = scalars.skip;
  slot.found_inf = scalars.found_inf;
}

STEPGRAPH_HOST_DEVICE record_group record_of(const group_progress& progress) {
  return {progress.step, progress.learning_rate, progress.weight_decay};
}

/// A ring of `capacity` slots, at least two. The record of launch n lies in slot (n - 1) %
/// capacity, its groups from element slot * group count on. Null: no records are written.
struct record_ring_view {
  record_slot* slots = nullptr;
  record_group* groups = nullptr;
  std::uint32_t capacity = 0;
};

}  // namespace stepgraph
