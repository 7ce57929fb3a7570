#include "../../graph_runtime/src/statistics_layout.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "common/random_numbers.hpp"

namespace stepgraph::detail {
namespace {

/// Expects the chunks of a block to be those that the kernel derives from the whole list.
void expect_settled(const std::vector<std::uint64_t>& group_chunks) {
  const std::uint32_t per_block = statistics_chunks_per_block(group_chunks);
  std::uint64_t count = 0;
  std::uint64_t chunks = 0;
  for (const std::uint64_t group : group_chunks) {
    count += filled_up(group, per_block);
    chunks += group;
  }
  EXPECT_EQ(chunks_per_statistics_block(count), per_block) << chunks;
  EXPECT_EQ(statistics_blocks_of(group_chunks), statistics_blocks(count)) << chunks;
  EXPECT_LE(count - chunks, group_chunks.size() * (per_block - 1)) << chunks;
}

TEST(StatisticsLayout, OneGroupHasTheBlocksOfItsChunks) {
  for (const std::uint64_t chunks :
       {0u, 1u, 4095u, 4096u, 4097u, 16381u, 16383u, 16384u, 262143u, 262144u}) {
    EXPECT_EQ(statistics_chunks_per_block(std::vector{chunks}),
              chunks_per_statistics_block(chunks));
    EXPECT_EQ(statistics_blocks_of(std::vector{chunks}), statistics_blocks(chunks)) << chunks;
  }
}

// Filling up can itself carry the list over the length at which a block takes more chunks.
TEST(StatisticsLayout, FillingUpAcrossAChangeOfTheBlockSettles) {
  // A longer list never takes fewer chunks a block than a shorter one.
  for (const std::uint64_t change : {4096u, 16384u, 65536u, 262144u}) {
    for (std::uint64_t first = change - 200; first < change + 100; ++first) {
      expect_settled({first, 1, 2, 3, 0, 5});
      expect_settled({1, first - 60, 1, 1, 1});
      EXPECT_GE(statistics_chunks_per_block(std::vector{first, first, std::uint64_t{1}}),
                chunks_per_statistics_block(2 * first + 1));
    }
  }
}

TEST(StatisticsLayout, RandomGroupsSettle) {
  test::integer_generator random(61);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<std::uint64_t> groups(2 + random.below(63));
    for (std::uint64_t& chunks : groups) chunks = random.below(random.below(2) == 0 ? 9 : 3000);
    expect_settled(groups);
  }
}

}  // namespace
}  // namespace stepgraph::detail
