#pragma once

#include <cstdint>

#include "stepgraph/math/portability.hpp"

/// Launch sizes of the operations. Known without a device: plans print them, and the order in
/// which `grad_stats` adds follows from them, on the host too.
namespace stepgraph {

/// Elements in a chunk, the part of one tensor that few blocks update. Small, so that short tensor
/// lists still fill the device and the last wave of a long one is short.
inline constexpr std::uint32_t chunk_elements = 2048;

inline constexpr std::uint32_t update_threads = 128;
/// Blocks of an update that share one chunk, each with a run of consecutive elements.
inline constexpr std::uint32_t update_blocks_per_chunk = 2;
inline constexpr std::uint32_t statistics_threads = 256;
inline constexpr std::uint32_t advance_step_threads = 256;
/// Groups whose step one block prepares.
inline constexpr std::uint32_t groups_per_prepare_block = 64;
/// Norm groups of a step, at most.
inline constexpr std::uint32_t max_norm_groups = 64;

/// Chunks of a tensor of `numel` elements; 0 for an empty one.
STEPGRAPH_HOST_DEVICE constexpr std::uint64_t chunk_count(std::uint64_t numel) {
  return (numel + chunk_elements - 1) / chunk_elements;
}

inline constexpr std::uint32_t most_chunks_per_statistics_block = 16;

/// Consecutive chunks that one block of `grad_stats` adds up: one where all blocks read side by
/// side anyhow, more where that leaves few sums to be added up. Depends only on the list, never on
/// the device.
STEPGRAPH_HOST_DEVICE constexpr std::uint32_t chunks_per_statistics_block(std::uint64_t chunks) {
  return chunks <= 512     ? 1
         : chunks < 16384  ? 4
         : chunks < 262144 ? 8
                           : most_chunks_per_statistics_block;
}

/// Blocks of `grad_stats` that read `chunks` chunks; at least one.
constexpr std::uint32_t statistics_blocks(std::uint64_t chunks) {
  const std::uint64_t per_block = chunks_per_statistics_block(chunks);
  return chunks == 0 ? 1 : static_cast<std::uint32_t>((chunks + per_block - 1) / per_block);
}

/// Blocks that prepare the groups of a step; at least one, which prepares the step itself.
STEPGRAPH_HOST_DEVICE constexpr std::uint32_t prepare_blocks(std::uint32_t groups) {
  return groups == 0 ? 1 : (groups + groups_per_prepare_block - 1) / groups_per_prepare_block;
}

}  // namespace stepgraph
