#pragma once

#include "dependent_launch.cuh"
#include "stepgraph/kernels/launch_shape.hpp"
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

/// Applies the entries of a batch for groups [first_group, last_group) and, if asked, those of the
/// whole step, unless the batch was applied before. `samples` receives a number of samples set.
__device__ __forceinline__ void apply_settings_in_block(const step_block_view& block,
                                                        const settings_batch& settings,
                                                        std::uint32_t first_group,
                                                        std::uint32_t last_group, bool whole,
                                                        std::uint64_t& samples) {
  if (settings.serial == 0 || settings.serial == block.scalars->settings_serial) return;
  // No two entries of a batch name the same field of the same group, and no two fields share a
  // word.
  const setting* entries = settings.entries != nullptr ? settings.entries : settings.few;
  for (std::uint32_t i = threadIdx.x; i < settings.count; i += blockDim.x) {
    const setting entry = entries[i];
    if (entry.group == whole_step) {
      if (whole) math::apply_setting(*block.step, *block.scalars, entry.field, entry.value);
      if (entry.field == setting_field::samples) {
        samples = static_cast<std::uint64_t>(entry.value);
      }
    } else if (first_group <= entry.group && entry.group < last_group) {
      math::apply_setting(block.groups[entry.group], block.progress[entry.group], entry.field,
                          entry.value);
    }
  }
}

/// The first half of the advance, for `groups_per_prepare_block` groups a block: applies the
/// settings and prepares the groups, in block 0 also the step. For blocks of `prepare_threads`
/// threads.
///
/// The bias corrections and the schedules of a group are computed by different warps, so that a
/// short list of groups costs the longest of them and not their sum.
inline constexpr int prepare_threads = 256;

__device__ __forceinline__ void prepare_step_in_block(const step_block_view& block,
                                                      const settings_batch& settings,
                                                      std::uint32_t index) {
  constexpr int lanes = static_cast<int>(groups_per_prepare_block);
  static_assert(prepare_threads == 4 * lanes);
  __shared__ double parts[4][lanes];
  __shared__ std::uint64_t samples;
  const std::uint32_t first = index * groups_per_prepare_block;
  if (threadIdx.x == 0) samples = block.scalars->samples;
  if (settings.serial != 0) {
    __syncthreads();
    apply_settings_in_block(block, settings, first, first + lanes, index == 0, samples);
  }
  __syncthreads();
  if (index == 0 && threadIdx.x == prepare_threads - 1) {
    *block.prepared_step = math::prepare_step(*block.step, *block.scalars);
  }
  const int part = static_cast<int>(threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const std::uint32_t group = first + lane;
  if (group < block.group_count) {
    const group_settings& mine = block.groups[group];
    const group_progress progress = block.progress[group];
    if (part < 2) {
      // One call for both, so that the curves are in the code once.
      const bool rate = part == 0;
      parts[part][lane] = math::next_value(
          rate ? mine.learning_rate_input : mine.weight_decay_input,
          rate ? mine.learning_rate_schedule : mine.weight_decay_schedule,
          rate ? mine.learning_rate : mine.weight_decay, block.schedules, progress.step, samples);
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
}

/// Counts the blocks of the launch that have finished; true in every thread of the last one, which
/// then sees what the others wrote.
__device__ __forceinline__ bool is_last_block(std::uint32_t* arrivals) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    // atomicInc wraps to zero at the last arrival, which leaves the counter ready for the next
    // replay.
    is_last = atomicInc(arrivals, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

/// Writes the step's record; see record_slot for the order. `scalars` are those of the step; every
/// thread has written the progress of its groups itself.
__device__ __forceinline__ void write_record_in_block(const step_block_view& block,
                                                      const step_scalars& scalars) {
  const record_ring_view& ring = block.records;
  const std::uint64_t place = (scalars.launches - 1) % ring.capacity;
  if (threadIdx.x == 0) {
    fill_record(scalars, ring.slots[place]);
    ring.slots[scalars.launches % ring.capacity].sequence = 0;
  }
  for (std::uint32_t i = threadIdx.x; i < block.group_count; i += blockDim.x) {
    ring.groups[place * block.group_count + i] = record_of(block.progress[i]);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    *reinterpret_cast<volatile unsigned long long*>(&ring.slots[place].sequence) = scalars.launches;
  }
}

/// What the second half starts from, in the threads that have something to write.
struct finish_inputs {
  bool works = false;
  step_settings settings;
  math::prepared_step prepared;
  step_scalars scalars;
  math::prepared_group group;  ///< number threadIdx.x, if there is one
};

__device__ __forceinline__ finish_inputs read_finish_inputs(const step_block_view& block) {
  finish_inputs inputs;
  inputs.works =
      threadIdx.x == 0 || threadIdx.x < block.group_count || threadIdx.x < block.norm_group_count;
  if (!inputs.works) return inputs;
  inputs.settings = read_fresh(block.step);
  inputs.prepared = read_fresh(block.prepared_step);
  inputs.scalars = read_fresh(block.scalars);
  if (threadIdx.x < block.group_count) {
    inputs.group = read_fresh(block.prepared_groups + threadIdx.x);
  }
  return inputs;
}

/// The second half: publishes the scalars and, unless the step is skipped, the terms of every
/// group; writes the record. `statistics` is valid in every thread; `total_of(i)` is the total of
/// norm group i. A block barrier lies between the reading of `inputs` and the call.
template <class TotalOf>
__device__ __forceinline__ void finish_step_in_block(const step_block_view& block,
                                                     const settings_batch& settings,
                                                     const gradient_statistics& statistics,
                                                     TotalOf&& total_of, finish_inputs& inputs) {
  step_scalars& scalars = inputs.scalars;
  if (inputs.works) {
    // Every thread takes the same few decisions, which is faster than telling it.
    if (settings.serial != 0) scalars.settings_serial = settings.serial;
    math::finish_step(inputs.settings, inputs.prepared, statistics, scalars);
    if (threadIdx.x == 0) *block.scalars = scalars;
    if (scalars.skip == 0) {
      for (std::uint32_t group = threadIdx.x; group < block.group_count; group += blockDim.x) {
        if (group != threadIdx.x) inputs.group = read_fresh(block.prepared_groups + group);
        block.terms[group] = math::finish_group(inputs.group, scalars);
        block.progress[group] = inputs.group.progress;
      }
    }
    for (std::uint32_t i = threadIdx.x; i < block.norm_group_count; i += blockDim.x) {
      block.norms[i] = statistics.measured != 0
                           ? math::norm_of_total(inputs.settings.norm, total_of(i),
                                                 inputs.prepared.inverse_scale)
                           : 0.0;
    }
  }
  if (block.records.slots != nullptr) write_record_in_block(block, scalars);
}

}  // namespace stepgraph::cuda
