#include "stepgraph/kernels/tensor_table.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace stepgraph {
namespace {

TEST(TensorTable, ChunksCoverEveryElementOnce) {
  for (const std::uint64_t numel : {0ull, 1ull, 2047ull, 2048ull, 2049ull, 4096ull, 10000ull}) {
    std::vector<chunk_descriptor> chunks;
    append_chunks(chunks, 3, numel);
    ASSERT_EQ(chunks.size(), chunk_count(numel));
    std::uint64_t covered = 0;
    for (std::uint32_t index = 0; index < chunks.size(); ++index) {
      EXPECT_EQ(chunks[index].tensor, 3u);
      EXPECT_EQ(chunks[index].index, index);
      ASSERT_LT(covered, numel);
      covered += chunk_elements;
    }
    EXPECT_GE(covered, numel);
  }
}

TEST(TensorTable, ChunksOfFurtherTensorsFollow) {
  std::vector<chunk_descriptor> chunks;
  append_chunks(chunks, 0, 2049);
  append_chunks(chunks, 1, 0);
  append_chunks(chunks, 2, 1);
  ASSERT_EQ(chunks.size(), 3u);
  EXPECT_EQ(chunks[2].tensor, 2u);
  EXPECT_EQ(chunks[2].index, 0u);
}

TEST(TensorTable, ChunkCountOfTensorsPast32BitsIsExact) {
  EXPECT_EQ(chunk_count((1ull << 32) + 1), (1ull << 21) + 1);
}

TEST(TensorTable, OneMisalignedOperandMakesATensorUnaligned) {
  alignas(16) std::byte memory[32];
  const auto at = [&](std::size_t offset) { return static_cast<void*>(memory + offset); };
  tensor_descriptor tensor;
  tensor.parameter = tensor.gradient = tensor.exp_avg = tensor.exp_avg_sq = at(0);
  EXPECT_TRUE(all_operands_aligned(tensor));
  for (void** operand : {&tensor.parameter, &tensor.gradient, &tensor.master, &tensor.exp_avg,
                         &tensor.exp_avg_sq, &tensor.max_exp_avg_sq}) {
    void* const before = *operand;
    for (const std::size_t offset : {2u, 4u, 8u, 14u}) {
      *operand = at(offset);
      EXPECT_FALSE(all_operands_aligned(tensor));
    }
    *operand = at(16);
    EXPECT_TRUE(all_operands_aligned(tensor));
    *operand = before;
  }
}

// At most so many partial sums remain that one block adds them in a few rounds.
TEST(LaunchShape, StatisticsBlocksCoverEveryChunk) {
  EXPECT_EQ(statistics_blocks(0), 1u);
  for (const std::uint64_t chunks : {1ull, 2ull, 512ull, 513ull, 4097ull, 16384ull, 65535ull,
                                     65536ull, 65537ull, 1'000'000ull}) {
    const std::uint64_t blocks = statistics_blocks(chunks);
    const std::uint64_t per_block = chunks_per_statistics_block(chunks);
    EXPECT_GE(blocks * per_block, chunks) << chunks;
    EXPECT_LT((blocks - 1) * per_block, chunks) << chunks;
  }
}

}  // namespace
}  // namespace stepgraph
