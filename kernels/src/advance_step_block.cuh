#pragma once

#include "block_message.cuh"
#include "dependent_launch.cuh"
#include "stepgraph/kernels/launch_shape.hpp"
#include "stepgraph/kernels/step_block.hpp"
#include "stepgraph/math/advance_step.hpp"
#include "write_record.cuh"

/// Bodies that run in one thread block: the writers of the step's scalars.
namespace stepgraph::cuda {

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

/// For blocks of `prepare_threads` threads.
inline constexpr int prepare_threads = 256;

/// What the block that advances the step keeps from the first half to the second, in shared memory.
/// Bytes, because shared memory takes no constructors.
struct advance_memory {
  alignas(16) unsigned char scalars_bytes[sizeof(step_scalars)];
  alignas(16) unsigned char settings_bytes[sizeof(step_settings)];
  alignas(16) unsigned char prepared_bytes[sizeof(math::prepared_step)];
  double parts[4][groups_per_prepare_block];  ///< of each group, see below
  std::uint64_t samples;

  __device__ step_scalars& scalars() { return reinterpret_cast<step_scalars&>(scalars_bytes); }
  __device__ step_settings& settings() { return reinterpret_cast<step_settings&>(settings_bytes); }
  __device__ math::prepared_step& prepared() {
    return reinterpret_cast<math::prepared_step&>(prepared_bytes);
  }
};

/// What a thread keeps in registers while the gradients are on their way.
struct advance_inputs {
  math::prepared_group group;  ///< number threadIdx.x of the block, if there is one
  step_settings settings;      ///< these two in block 0
  math::prepared_step step;
};

/// The first half of the advance, for `groups_per_prepare_block` groups a block: applies the
/// settings and prepares the groups, in block 0 also the step. Blocks other than 0 leave their
/// groups in memory.
///
/// The bias corrections and the schedules of a group are computed by different warps, so that a
/// short list of groups costs the longest of them and not their sum.
__device__ __forceinline__ advance_inputs prepare_step_in_block(const step_block_view& block,
                                                                const settings_batch& settings,
                                                                std::uint32_t index,
                                                                advance_memory& memory) {
  constexpr int lanes = static_cast<int>(groups_per_prepare_block);
  static_assert(prepare_threads == 4 * lanes);
  const std::uint32_t first = index * groups_per_prepare_block;
  if (threadIdx.x == 0) memory.samples = block.scalars->samples;
  if (settings.serial != 0) {
    __syncthreads();
    apply_settings_in_block(block, settings, first, first + lanes, index == 0, memory.samples);
  }
  __syncthreads();
  if (index == 0 && threadIdx.x == prepare_threads - 1) {
    memory.scalars() = *block.scalars;
    memory.settings() = *block.step;
    memory.prepared() = math::prepare_step(memory.settings(), memory.scalars());
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
      memory.parts[part][lane] =
          math::next_value(rate ? mine.learning_rate_input : mine.weight_decay_input,
                           rate ? mine.learning_rate_schedule : mine.weight_decay_schedule,
                           rate ? mine.learning_rate : mine.weight_decay, block.schedules,
                           progress.step, memory.samples);
    } else {
      const double beta = part == 2 ? mine.beta1 : mine.beta2;
      memory.parts[part][lane] = math::next_bias_correction(mine, beta, progress);
    }
  }
  __syncthreads();
  advance_inputs inputs;
  if (part == 0 && group < block.group_count) {
    inputs.group =
        math::prepare_group(block.groups[group], block.progress[group], memory.parts[0][lane],
                            memory.parts[1][lane], memory.parts[2][lane], memory.parts[3][lane]);
    if (index != 0) block.prepared_groups[group] = inputs.group;
  }
  if (index == 0) {
    inputs.settings = memory.settings();
    inputs.step = memory.prepared();
  }
  return inputs;
}

/// The first half in blocks other than 0, which then tell block 0.
__device__ __forceinline__ void prepare_groups_for_block_0(const step_block_view& block,
                                                           const settings_batch& settings,
                                                           block_message* messages,
                                                           advance_memory& memory) {
  const std::uint32_t tag = message_tag(*block.scalars);
  prepare_step_in_block(block, settings, blockIdx.x, memory);
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  send<false>(messages + blockIdx.x - 1, tag, {});
}

/// The second half, in block 0: publishes the scalars and, unless the step is skipped, the terms of
/// every group; writes the record if the view names a ring. `inputs` is what the first half
/// returned; `statistics` is valid in every thread; `total_of(i)` is the total of norm group i.
template <class TotalOf>
__device__ __forceinline__ void finish_step_in_block(
    const step_block_view& block, const settings_batch& settings,
    const gradient_statistics& statistics, TotalOf&& total_of, const advance_inputs& inputs,
    block_message* messages, advance_memory& memory) {
  const std::uint32_t preparing = prepare_blocks(block.group_count);
  if (preparing > 1) {
    const std::uint32_t tag = message_tag(memory.scalars());
    for (std::uint32_t i = threadIdx.x; i < preparing - 1; i += blockDim.x) {
      receive<false>(messages + i, tag);
    }
    __threadfence();
    __syncthreads();
  }
  // Every thread decides, which is faster than telling it.
  const math::step_decision decision = math::decide_step(inputs.settings, inputs.step, statistics);
  if (!decision.skip) {
    for (std::uint32_t group = threadIdx.x; group < block.group_count; group += blockDim.x) {
      const math::prepared_group next =
          group < groups_per_prepare_block ? inputs.group : block.prepared_groups[group];
      block.terms[group] = math::finish_group(next, decision.gradient_scale);
      block.progress[group] = next.progress;
    }
  }
  // From the other end, by warps that have no group of a short list.
  const std::uint32_t from_end = blockDim.x - 1 - threadIdx.x;
  if (from_end == 0) {
    step_scalars scalars = memory.scalars();
    if (settings.serial != 0) scalars.settings_serial = settings.serial;
    // From memory: what this one thread needs would take registers from all of them.
    math::finish_step(memory.settings(), inputs.step, statistics, decision, scalars);
    *block.scalars = scalars;
  }
  for (std::uint32_t i = from_end; i < block.norm_group_count; i += blockDim.x) {
    block.norms[i] =
        block.norm_group_count == 1 || statistics.measured == 0
            ? decision.norm
            : math::norm_of_total(inputs.settings.norm, total_of(i), inputs.step.inverse_scale);
  }
  if (block.records.words != nullptr) {
    __syncthreads();
    write_record_in_block(block);
  }
}

}  // namespace stepgraph::cuda
