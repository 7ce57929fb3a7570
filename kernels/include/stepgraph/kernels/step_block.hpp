#pragma once

#include <cstdint>

#include "stepgraph/kernels/tensor_table.hpp"
#include "stepgraph/math/adam.hpp"
#include "stepgraph/math/step_scalars.hpp"

namespace stepgraph {

/// Everything that changes from step to step, by address: a view of the block that an executor
/// owns, in the memory where its kernels or loops run.
struct step_block_view {
  step_scalars* scalars = nullptr;
  step_settings* step = nullptr;
  group_settings* groups = nullptr;
  group_progress* progress = nullptr;
  math::adam_terms* terms = nullptr;
  std::uint32_t group_count = 0;
};

/// A batch of hand-set values. `entries` holds at most one value of each field of each group and
/// may lie in pinned host memory. Applied once: a batch whose `serial` is that of the last applied
/// batch is ignored, so a captured launch that repeats its arguments changes nothing. Serial 0
/// means no batch at all.
struct settings_batch {
  const setting* entries = nullptr;
  std::uint32_t count = 0;
  std::uint64_t serial = 0;
};

/// The tensors and chunks of one launch.
struct tensor_table_view {
  const tensor_descriptor* tensors = nullptr;
  const chunk_descriptor* chunks = nullptr;
  std::uint64_t chunk_count = 0;
  /// One counter a tensor, zero before the first launch; only on a device, only for FP8 parameters
  /// without master.
  std::uint32_t* arrivals = nullptr;
};

/// Options of an update that are fixed when it is planned.
struct update_options {
  bool zero_gradients = false;  ///< store zeros into the gradients, also when the step is skipped
  bool stochastic_rounding = false;  ///< of bf16 parameters without master
  std::uint64_t seed = 0;            ///< of the stochastic rounding
};

}  // namespace stepgraph
