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
///
/// The update waits for this block, so its memory is read in one round trip: thread 0 takes the
/// scalars, every thread the group it starts with, before anything is decided.
__device__ __forceinline__ void advance_step_in_block(const step_block_view& block,
                                                      const settings_batch& settings,
                                                      const gradient_statistics& statistics) {
  __shared__ __align__(16) unsigned char scalars_memory[sizeof(step_scalars)];
  __shared__ __align__(16) unsigned char step_memory[sizeof(step_settings)];
  auto& scalars = reinterpret_cast<step_scalars&>(scalars_memory);
  auto& step = reinterpret_cast<step_settings&>(step_memory);
  std::uint32_t group = threadIdx.x;
  group_settings mine;
  group_progress progress;
  const auto read = [&] {
    if (threadIdx.x == 0) {
      scalars = *block.scalars;
      step = *block.step;
    }
    if (group < block.group_count) {
      mine = block.groups[group];
      progress = block.progress[group];
    }
    __syncthreads();
  };
  read();
  if (settings.serial != 0 && settings.serial != scalars.settings_serial) {
    apply_settings_in_block(block, settings);
    read();
  }
  if (threadIdx.x == 0) {
    math::advance_scalars(step, statistics, scalars);
    *block.scalars = scalars;
  }
  __syncthreads();
  if (scalars.skip) return;
  while (group < block.group_count) {
    block.terms[group] = math::advance_group(mine, step, scalars, progress);
    block.progress[group] = progress;
    group += blockDim.x;
    if (group < block.group_count) {
      mine = block.groups[group];
      progress = block.progress[group];
    }
  }
}

}  // namespace stepgraph::cuda
