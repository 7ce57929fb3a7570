#pragma once

#include "stepgraph/kernels/step_block.hpp"
#include "stepgraph/math/advance_step.hpp"

/// Bodies that run in one thread block: the writers of the step's scalars.
namespace stepgraph::cuda {

/// Applies the batch unless it was the last one applied. Ends with a block barrier.
__device__ __forceinline__ void apply_settings_in_block(const step_block_view& block,
                                                        const settings_batch& settings) {
  // Every thread reads the serial before thread 0 writes it.
  const bool fresh = settings.serial != 0 && settings.serial != block.scalars->settings_serial;
  __syncthreads();
  if (fresh) {
    // No two entries of a batch name the same field of the same group, but the flags of a group
    // are one word: all entries of a group go to one thread.
    for (std::uint32_t i = 0; i < settings.count; ++i) {
      const setting entry = settings.entries[i];
      if (entry.group == whole_step) {
        if (threadIdx.x == 0) {
          math::apply_setting(*block.step, *block.scalars, entry.field, entry.value);
        }
      } else if (entry.group % blockDim.x == threadIdx.x) {
        math::apply_setting(block.groups[entry.group], block.progress[entry.group], entry.field,
                            entry.value);
      }
    }
    if (threadIdx.x == 0) block.scalars->settings_serial = settings.serial;
  }
  __syncthreads();
}

/// Advances the step: scalars by thread 0, groups by all threads.
__device__ __forceinline__ void advance_step_in_block(const step_block_view& block,
                                                      const settings_batch& settings,
                                                      const gradient_statistics& statistics) {
  apply_settings_in_block(block, settings);
  if (threadIdx.x == 0) math::advance_scalars(*block.step, statistics, *block.scalars);
  __syncthreads();
  if (block.scalars->skip) return;
  for (std::uint32_t group = threadIdx.x; group < block.group_count; group += blockDim.x) {
    block.terms[group] = math::advance_group(block.groups[group], *block.step, *block.scalars,
                                             block.progress[group]);
  }
}

}  // namespace stepgraph::cuda
