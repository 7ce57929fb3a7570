#pragma once

#include <cstdint>

#include "stepgraph/kernels/record_ring.hpp"
#include "stepgraph/kernels/tensor_table.hpp"
#include "stepgraph/math/advance_step.hpp"

namespace stepgraph {

/// Everything that changes from step to step, by address: a view of the block that an executor
/// owns, in the memory where its kernels or loops run.
struct step_block_view {
  step_scalars* scalars = nullptr;
  step_settings* step = nullptr;
  group_settings* groups = nullptr;
  group_progress* progress = nullptr;
  schedule_tables schedules;
  math::adam_terms* terms = nullptr;
  math::prepared_group* prepared_groups = nullptr;  ///< between the halves of advance_step
  double* norms = nullptr;   ///< of each norm group, as step_scalars::grad_norm
  record_ring_view records;  ///< where the step's record goes; null: not from here
  std::uint32_t group_count = 0;
  std::uint32_t norm_group_count = 0;
};

/// Names no tensor: a chunk that only fills up a block of `grad_stats`.
inline constexpr std::uint32_t no_tensor = 0xffffffffu;

/// The tensors, chunks and norm groups of one pass of `grad_stats`.
struct statistics_table_view {
  const tensor_descriptor* tensors = nullptr;
  const chunk_descriptor* chunks = nullptr;  ///< norm group by norm group; may name no_tensor
  std::uint64_t chunk_count = 0;
  /// Blocks before the end of each norm group, ascending; the last is the number of blocks.
  const std::uint32_t* norm_group_ends = nullptr;
  std::uint32_t norm_group_count = 1;
};

/// What `grad_stats` measures beside finding gradients that are not finite.
struct statistics_options {
  norm_kind norm = norm_kind::l2;
  bool count_zeros = false;
};

/// A batch of hand-set values: at most one value of each field of each group. `entries` may lie in
/// pinned host memory. Applied once: a batch whose `serial` is that of the last applied
/// batch is ignored, so a captured launch that repeats its arguments changes nothing. Serial 0
/// means no batch at all.
struct settings_batch {
  static constexpr std::uint32_t inline_capacity = 6;

  const setting* entries = nullptr;  ///< null: they are `few`
  std::uint32_t count = 0;
  std::uint64_t serial = 0;
  setting few[inline_capacity];  ///< travel with the launch itself
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

/// What an update leaves in the gradients.
enum class gradient_store : std::uint8_t {
  keep,      ///< what it has read
  zero,      ///< zeros, also when the step is skipped
  unscaled,  ///< gradients divided by the loss scale and clipped, rounded to their format; what it
             ///< has read when the step is skipped
};

/// Options of an update that are fixed when it is planned.
struct update_options {
  gradient_store gradients = gradient_store::keep;
  bool stochastic_rounding = false;  ///< of bf16 parameters without master
  std::uint64_t seed = 0;            ///< of the stochastic rounding
};

}  // namespace stepgraph
