#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "kernels/norm_groups.hpp"
#include "stepgraph/kernels/host_loops.hpp"

// The host's pass over the gradients, against sums in long double.
namespace stepgraph {
namespace {

using test::host_tensors;
using test::kernel_tensor;
using test::operand_bytes;
using test::operand_set;

/// The statistics of tensors of one norm group.
gradient_statistics statistics_of(const statistics_table_view& table,
                                  const statistics_options& options = {}) {
  double total = 0.0;
  const gradient_statistics found = host::grad_stats(table, options, &total);
  EXPECT_EQ(std::memcmp(&found.total, &total, sizeof(total)), 0);
  return found;
}

/// What a pass should find in the tensors of one group, or of all.
struct expected_statistics {
  long double squares = 0.0L;
  double largest = 0.0;
  std::uint64_t zeros = 0;
};

expected_statistics expect_of(const std::vector<kernel_tensor>& tensors,
                              const std::vector<operand_set>& contents, std::uint32_t group) {
  expected_statistics expected;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].group != group) continue;
    for (const float value :
         test::decode(tensors[t].signature.gradient, contents[t][test::gradient_operand])) {
      expected.squares += static_cast<long double>(value) * value;
      expected.largest = std::fmax(expected.largest, std::fabs(value));
      expected.zeros += value == 0.0f ? 1 : 0;
    }
  }
  return expected;
}

TEST(GradStats, SumDoesNotDependOnTheNumberOfThreads) {
  const std::vector<kernel_tensor> tensors = test::gradients_in_groups(1);
  const host_tensors placed(tensors, test::random_contents(tensors, 31));
  const int threads_before = omp_get_max_threads();
  omp_set_num_threads(1);
  const double expected = statistics_of(placed.host_statistics_table()).total;
  for (const int threads : {2, 3, 7, 16}) {
    omp_set_num_threads(threads);
    EXPECT_EQ(statistics_of(placed.host_statistics_table()).total, expected) << threads;
  }
  omp_set_num_threads(threads_before);
}

TEST(GradStats, TotalsAndZerosOfEveryNormGroupAreThoseOfAPlainLoop) {
  // One group more than tensors go to: it stays empty.
  for (const std::uint32_t groups : {1u, 2u, 7u, 63u}) {
    const std::vector<kernel_tensor> tensors = test::gradients_in_groups(groups);
    std::vector<operand_set> contents = test::random_contents(tensors, 32);
    test::plant_zeros(tensors, contents, 5);
    const host_tensors placed(tensors, contents);
    const test::grouped_chunks list = test::chunks_by_group(placed, groups + 1);
    for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
      std::vector<double> totals(groups + 1, -1.0);
      const gradient_statistics found =
          host::grad_stats(list.view(placed.descriptors), {norm, true}, totals.data());
      std::uint64_t zeros = 0;
      for (std::uint32_t group = 0; group <= groups; ++group) {
        const expected_statistics expected = expect_of(tensors, contents, group);
        zeros += expected.zeros;
        if (norm == norm_kind::infinity) {
          EXPECT_EQ(totals[group], expected.largest) << group;
        } else {
          const auto squares = static_cast<double>(expected.squares);
          EXPECT_NEAR(totals[group], squares, 1e-13 * squares) << group;
        }
      }
      EXPECT_EQ(found.zeros, zeros);
      EXPECT_EQ(found.total, math::combined_total(totals.data(), groups + 1, norm));
      EXPECT_EQ(found.measured, 1u);
    }
  }
}

TEST(GradStats, ZerosAreCountedOnlyWhenAskedFor) {
  const std::vector<kernel_tensor> tensors = test::gradients_in_groups(1);
  std::vector<operand_set> contents = test::random_contents(tensors, 34);
  test::plant_zeros(tensors, contents, 3);
  const host_tensors placed(tensors, contents);
  EXPECT_EQ(statistics_of(placed.host_statistics_table()).zeros, 0u);
  EXPECT_EQ(statistics_of(placed.host_statistics_table(), {norm_kind::l2, true}).zeros,
            expect_of(tensors, contents, 0).zeros);
}

void expect_every_chunk_added(std::span<const std::uint32_t> lengths) {
  for (const std::uint32_t length : lengths) {
    const test::long_list list(length);
    long double squares = 0.0L;
    std::uint64_t zeros = 0;
    for (const chunk_descriptor& chunk : list.chunks) {
      const tensor_descriptor& tensor = list.tensors[chunk.tensor];
      for (std::uint64_t i = 0; i < tensor.numel; ++i) {
        const float value = static_cast<const float*>(tensor.gradient)[i];
        squares += static_cast<long double>(value) * value;
        zeros += value == 0.0f ? 1 : 0;
      }
    }
    const gradient_statistics found = statistics_of(
        {list.tensors.data(), list.chunks.data(), list.chunks.size()}, {norm_kind::l2, true});
    EXPECT_NEAR(found.total / static_cast<double>(squares), 1.0, 1e-12) << length;
    EXPECT_EQ(found.zeros, zeros) << length;
  }
}

TEST(GradStats, LongListsAddEveryChunk) {
  expect_every_chunk_added(test::list_lengths);
  expect_every_chunk_added(test::larger_list_lengths);
}

TEST(GradStats, OfNoTensorsIsZero) {
  for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
    const gradient_statistics statistics = statistics_of({}, {norm, true});
    EXPECT_EQ(statistics.total, 0.0);
    EXPECT_EQ(statistics.zeros, 0u);
    EXPECT_EQ(statistics.measured, 1u);
  }
}

TEST(GradStats, FindsOneNonFiniteElementAnywhere) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const storage_format gradient :
       {storage_format::f32, storage_format::f16, storage_format::bf16}) {
    update_signature signature;
    signature.gradient = gradient;
    const std::vector<kernel_tensor> tensors = {{signature, 10, 0, 0}, {signature, 4100, 0, 1}};
    for (const float value : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
      for (const std::uint64_t position : {0u, 1u, 2047u, 2048u, 4095u, 4099u}) {
        std::vector<operand_set> contents = test::random_contents(tensors, 33);
        const operand_bytes bad = test::encode(gradient, std::span(&value, 1));
        std::memcpy(contents[1][test::gradient_operand].data() + position * bad.size(), bad.data(),
                    bad.size());
        const host_tensors placed(tensors, contents);
        for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
          EXPECT_FALSE(std::isfinite(statistics_of(placed.host_statistics_table(), {norm}).total))
              << name_of(gradient) << " " << value << " at " << position;
        }
      }
    }
  }
}

}  // namespace
}  // namespace stepgraph
