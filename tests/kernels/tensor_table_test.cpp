#include "stepgraph/kernels/tensor_table.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace stepgraph {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::SizeIs;

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

TEST(TensorTable, GradientRunsSayWhereTheGradientOfEachChunkLies) {
  alignas(16) static std::byte memory[16];
  const auto at = [&](std::size_t offset) { return static_cast<void*>(memory + offset); };
  std::vector<tensor_descriptor> tensors(3);
  tensors[0].numel = 5000;
  tensors[0].signature.gradient = storage_format::f32;
  tensors[0].gradient = at(0);
  tensors[1].numel = 2048;
  tensors[1].signature.gradient = storage_format::bf16;
  tensors[1].gradient = at(2);
  tensors[2].numel = 3;
  tensors[2].signature.gradient = storage_format::f16;
  tensors[2].gradient = at(8);
  std::vector<chunk_descriptor> chunks;
  for (std::uint32_t t = 0; t < tensors.size(); ++t) append_chunks(chunks, t, tensors[t].numel);
  chunks.push_back({no_tensor, 0});
  const std::vector<gradient_run> runs = gradient_runs_of(chunks, tensors.data());
  const auto says = [](std::size_t offset, std::uint32_t count, storage_format format,
                       bool aligned) {
    const void* const data = count == 0 ? nullptr : memory + offset;
    return AllOf(Field(&gradient_run::data, data), Field(&gradient_run::count, count),
                 Field(&gradient_run::format, format),
                 Field(&gradient_run::aligned, aligned ? 1 : 0));
  };
  using enum storage_format;
  EXPECT_THAT(runs, ElementsAre(says(0, 2048, f32, true), says(8192, 2048, f32, true),
                                says(16384, 904, f32, true), says(2, 2048, bf16, false),
                                says(8, 3, f16, false), says(0, 0, f32, true)));
}

TEST(TensorTable, ListsWhoseBlocksReadSeveralChunksHaveNoGradientRuns) {
  tensor_descriptor tensor;
  tensor.numel = 1;
  EXPECT_THAT(gradient_runs_of({}, &tensor), IsEmpty());
  std::vector<chunk_descriptor> chunks(512);
  EXPECT_THAT(gradient_runs_of(chunks, &tensor), SizeIs(512));
  chunks.push_back({});
  EXPECT_THAT(gradient_runs_of(chunks, &tensor), IsEmpty());
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
