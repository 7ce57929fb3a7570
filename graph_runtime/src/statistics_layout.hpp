#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "stepgraph/kernels/launch_shape.hpp"

/// How grad_stats lays out its norm groups: one after the other, each filled up to whole blocks. A
/// group that is alone needs no filling up.
namespace stepgraph::detail {

/// Chunks of `chunks`, filled up to whole blocks.
constexpr std::uint64_t filled_up(std::uint64_t chunks, std::uint32_t chunks_per_block) {
  return (chunks + chunks_per_block - 1) / chunks_per_block * chunks_per_block;
}

/// Chunks of one block, from the chunks of each norm group. Filling up a group changes the number
/// of chunks, and with it the chunks of a block: settles on what the whole list, filled up, asks
/// for.
inline std::uint32_t statistics_chunks_per_block(std::span<const std::uint64_t> group_chunks) {
  std::uint64_t count = 0;
  for (const std::uint64_t chunks : group_chunks) count += chunks;
  if (group_chunks.size() <= 1) return chunks_per_statistics_block(count);
  for (;;) {
    const std::uint32_t per_block = chunks_per_statistics_block(count);
    count = 0;
    for (const std::uint64_t chunks : group_chunks) count += filled_up(chunks, per_block);
    if (chunks_per_statistics_block(count) == per_block) return per_block;
  }
}

/// Blocks that read the gradients.
inline std::uint64_t statistics_blocks_of(std::span<const std::uint64_t> group_chunks) {
  const std::uint32_t per_block = statistics_chunks_per_block(group_chunks);
  std::uint64_t blocks = 0;
  for (const std::uint64_t chunks : group_chunks)
    blocks += filled_up(chunks, per_block) / per_block;
  return std::max<std::uint64_t>(blocks, 1);
}

}  // namespace stepgraph::detail
