#pragma once

#include "stepgraph/kernels/step_block.hpp"
#include "stepgraph/math/advance_step.hpp"

/// Bodies that run in one thread block: the writers of the step's scalars.
namespace stepgraph::cuda {

/// Reads what another block of the same kernel may have written.
template <class Value>
__device__ __forceinline__ Value read_fresh(const Value* source) {
  static_assert(sizeof(Value) % 8 == 0);
  union {
    unsigned long long words[sizeof(Value) / 8];
    Value value;
  } copy = {};
#pragma unroll
  for (unsigned i = 0; i < sizeof(Value) / 8; ++i) {
    copy.words[i] = __ldcg(reinterpret_cast<const unsigned long long*>(source) + i);
  }
  return copy.value;
}

/// Applies the batch unless it was the last one applied. Ends with a block barrier.
__device__ __forceinline__ void apply_settings_in_block(const step_block_view& block,
                                                        const settings_batch& settings) {
  // Every thread reads the serial before thread 0 writes it.
  const bool fresh = settings.serial != 0 && settings.serial != block.scalars->settings_serial;
  __syncthreads();
  if (fresh) {
    // No two entries of a batch name the same field of the same group, and no two fields share a
    // word.
    const setting* entries = settings.entries != nullptr ? settings.entries : settings.few;
    for (std::uint32_t i = threadIdx.x; i < settings.count; i += blockDim.x) {
      const setting entry = entries[i];
      if (entry.group == whole_step) {
        math::apply_setting(*block.step, *block.scalars, entry.field, entry.value);
      } else {
        math::apply_setting(block.groups[entry.group], block.progress[entry.group], entry.field,
                            entry.value);
      }
    }
    if (threadIdx.x == 0) block.scalars->settings_serial = settings.serial;
  }
  __syncthreads();
}

/// The first half of the advance: applies the settings and prepares the step and every group. For
/// blocks of `prepare_threads` threads.
///
/// The bias corrections and the schedules of a group are computed by different warps, so that a
/// short list of groups costs the longest of them and not their sum.
inline constexpr int prepare_threads = 256;

__device__ __forceinline__ void prepare_step_in_block(const step_block_view& block,
                                                      const settings_batch& settings) {
  constexpr int at_once = 64;  // groups
  __shared__ double parts[4][at_once];
  if (settings.serial != 0) apply_settings_in_block(block, settings);
  if (threadIdx.x == prepare_threads - 1) {
    *block.prepared_step = math::prepare_step(*block.step, *block.scalars);
  }
  const int part = static_cast<int>(threadIdx.x) / at_once;
  const int lane = static_cast<int>(threadIdx.x) % at_once;
  for (std::uint32_t first = 0; first < block.group_count; first += at_once) {
    const std::uint32_t group = first + lane;
    if (group < block.group_count) {
      const group_settings& mine = block.groups[group];
      const group_progress progress = block.progress[group];
      if (part == 0) {
        parts[0][lane] = math::next_learning_rate(mine, progress);
      } else if (part == 1) {
        parts[1][lane] = math::next_weight_decay(mine, progress);
      } else {
        const double beta = part == 2 ? mine.beta1 : mine.beta2;
        parts[part][lane] = math::next_bias_correction(mine, beta, progress);
      }
    }
    __syncthreads();
    if (part == 0 && group < block.group_count) {
      block.prepared_groups[group] =
          math::prepare_group(block.groups[group], block.progress[group], parts[0][lane],
                              parts[1][lane], parts[2][lane], parts[3][lane]);
    }
    __syncthreads();
  }
}

/// The second half: publishes the scalars and, unless the step is skipped, the terms of every
/// group. `statistics` is valid in every thread; `total_of(i)` is the total of norm group i.
template <class TotalOf>
__device__ __forceinline__ void finish_step_in_block(const step_block_view& block,
                                                     const gradient_statistics& statistics,
                                                     TotalOf&& total_of) {
  // Every thread takes the same few decisions, which is faster than telling it.
  const step_settings settings = read_fresh(block.step);
  const math::prepared_step prepared = read_fresh(block.prepared_step);
  step_scalars scalars = read_fresh(block.scalars);
  std::uint32_t group = threadIdx.x;
  math::prepared_group mine;
  if (group < block.group_count) mine = read_fresh(block.prepared_groups + group);
  __syncthreads();  // All have read what thread 0 replaces.
  math::finish_step(settings, prepared, statistics, scalars);
  if (threadIdx.x == 0) *block.scalars = scalars;
  for (std::uint32_t i = threadIdx.x; i < block.norm_group_count; i += blockDim.x) {
    block.norms[i] = statistics.measured != 0
                         ? math::norm_of_total(settings.norm, total_of(i), prepared.inverse_scale)
                         : 0.0;
  }
  if (scalars.skip != 0) return;
  while (group < block.group_count) {
    block.terms[group] = math::finish_group(mine, scalars);
    block.progress[group] = mine.progress;
    group += blockDim.x;
    if (group < block.group_count) mine = read_fresh(block.prepared_groups + group);
  }
}

}  // namespace stepgraph::cuda
