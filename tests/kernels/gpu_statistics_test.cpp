#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "kernels/device_problem.hpp"
#include "kernels/norm_groups.hpp"

// grad_stats, with its advance and as totals for an advance of its own, against the host loops, bit
// for bit.
namespace stepgraph {
namespace {

using cuda::launch_order;
using test::check;
using test::device_block;
using test::device_buffer;
using test::device_tensors;
using test::device_workspace;
using test::host_block;
using test::host_tensors;
using test::kernel_tensor;
using test::operand_bytes;
using test::operand_set;

class GpuStatistics : public test::launcher_test {
 protected:
  /// Runs both forms three times on both sides, so that a counter that is not reset shows.
  void expect_same_statistics(const statistics_table_view& on_host,
                              const statistics_table_view& on_device,
                              const statistics_options& options) {
    SCOPED_TRACE(std::to_string(on_host.chunk_count) + " chunks, " +
                 std::to_string(on_host.norm_group_count) + " norm groups" +
                 (options.norm == norm_kind::l2 ? ", l2" : ", infinity") +
                 (options.count_zeros ? ", zeros" : ""));
    host_block block = test::varied_block(on_host.norm_group_count);
    block.step.norm = options.norm;
    const device_block together(block);
    const device_block apart(block);
    const device_workspace workspace(on_host.chunk_count);
    const device_workspace workspace_apart(on_host.chunk_count);
    const device_buffer<double> totals(on_host.norm_group_count + 1);
    for (int step = 0; step < 3; ++step) {
      test::measure_and_advance(block, on_host, {}, options.count_zeros);
      check(cuda::launch_grad_stats(on_device, options, workspace.view(), together.view(), {},
                                    launch_order::full, stream().get()));
      test::expect_same_block(together.read(), block);
      check(cuda::launch_grad_totals(on_device, options, workspace_apart.view(), apart.view(),
                                     totals.data(), launch_order::full, stream().get()));
      check(cuda::launch_advance_step(apart.view(), {}, totals.data(), workspace_apart.view(),
                                      launch_order::programmatic, stream().get()));
      test::expect_same_block(apart.read(), block);
      EXPECT_EQ(totals.read().back(), static_cast<double>(block.scalars.zeros));
    }
  }

  /// All norms, with and without zeros, over tensors whose groups are their norm groups.
  void expect_same_for_all_options(const std::vector<kernel_tensor>& tensors,
                                   const std::vector<operand_set>& contents,
                                   std::uint32_t norm_groups) {
    const host_tensors placed(tensors, contents);
    const device_tensors on_device(tensors, contents);
    const test::grouped_chunks list = test::chunks_by_group(placed, norm_groups);
    const device_buffer<chunk_descriptor> chunks(list.chunks);
    const device_buffer<std::uint32_t> ends(list.ends);
    for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
      for (const bool count_zeros : {false, true}) {
        expect_same_statistics(
            list.view(placed.descriptors),
            {on_device.descriptors(), chunks.data(), chunks.size(), ends.data(), norm_groups},
            {norm, count_zeros});
      }
    }
  }

  void expect_same_for_long_lists(std::span<const std::uint32_t> lengths) {
    for (const std::uint32_t length : lengths) {
      test::long_list list(length);
      // Also dealt out to norm groups of very different sizes, one of them empty.
      const auto end_of = [&](std::size_t part) {
        return list.chunks.begin() + static_cast<std::ptrdiff_t>(part);
      };
      const test::grouped_chunks one({list.chunks});
      const test::grouped_chunks four({{end_of(0), end_of(1)},
                                       {end_of(1), end_of(length / 3)},
                                       {},
                                       {end_of(length / 3), end_of(length)}});
      const device_buffer<float> gradient(list.gradient);
      test::long_list shared = list;
      list.point_at(list.gradient.data());
      shared.point_at(gradient.data());
      const device_buffer<tensor_descriptor> tensors(shared.tensors);
      for (const test::grouped_chunks* grouped : {&one, &four}) {
        const device_buffer<chunk_descriptor> chunks(grouped->chunks);
        const device_buffer<std::uint32_t> ends(grouped->ends);
        for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
          expect_same_statistics(grouped->view(list.tensors),
                                 {tensors.data(), chunks.data(), chunks.size(), ends.data(),
                                  static_cast<std::uint32_t>(grouped->ends.size())},
                                 {norm, norm != norm_kind::l2});
        }
      }
    }
  }

  /// Blocks read several chunks of one format side by side: whole ones, or also parts of chunks
  /// that begin at an address of 16 bytes or elsewhere.
  void expect_same_for_one_format(std::span<const std::uint32_t> lengths, bool whole) {
    constexpr std::uint64_t pool = 8 * chunk_elements;
    const std::uint32_t longest = *std::max_element(lengths.begin(), lengths.end());
    for (const storage_format format :
         {storage_format::f32, storage_format::f16, storage_format::bf16}) {
      test::integer_generator random(49);
      operand_bytes gradient = test::random_gradient(format, pool, random);
      const std::size_t element = gradient.size() / pool;
      std::fill_n(gradient.begin(), 5 * element, std::byte{0});
      const device_buffer<std::byte> there(gradient);
      const auto tensors_in = [&](std::byte* memory) {
        std::vector<tensor_descriptor> tensors;
        const std::pair<std::uint64_t, std::size_t> parts[] = {
            {pool, 0}, {1024, 0}, {1027, 8}, {3000, 1}};
        for (const auto& [numel, first] : parts) {
          tensor_descriptor tensor;
          tensor.numel = numel;
          tensor.signature.gradient = format;
          tensor.gradient = memory + first * element;
          tensors.push_back(tensor);
        }
        return tensors;
      };
      std::vector<chunk_descriptor> chunks;
      for (std::uint32_t i = 0; i < longest; ++i) {
        const std::uint32_t tensor = whole ? 0 : i % 7 % 4;
        chunks.push_back({tensor, tensor == 0 ? i * 5 % 8 : tensor == 3 ? i % 2 : 0});
      }
      const std::vector<tensor_descriptor> here = tensors_in(gradient.data());
      const device_buffer<tensor_descriptor> tensors(tensors_in(there.data()));
      const device_buffer<chunk_descriptor> device_chunks(chunks);
      for (const std::uint64_t count : lengths) {
        for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
          expect_same_statistics({here.data(), chunks.data(), count},
                                 {tensors.data(), device_chunks.data(), count},
                                 {norm, norm == norm_kind::l2});
        }
      }
    }
  }
};

/// What takes long under compute-sanitizer.
class GpuLargeStatistics : public GpuStatistics {};

TEST_F(GpuStatistics, EveryNormGroupHasTheBitsOfTheHostLoop) {
  for (const std::uint32_t used : {1u, 2u, 7u, 64u}) {
    const std::vector<kernel_tensor> tensors = test::gradients_in_groups(used);
    std::vector<operand_set> contents = test::random_contents(tensors, 43);
    test::plant_zeros(tensors, contents, 5);
    expect_same_for_all_options(tensors, contents, used);
    // And with an empty norm group at the end.
    if (used < max_norm_groups) expect_same_for_all_options(tensors, contents, used + 1);
  }
}

TEST_F(GpuStatistics, NothingAtAllAdvancesTheStep) {
  expect_same_for_all_options({}, {}, 1);
  expect_same_for_all_options({}, {}, 3);
}

TEST_F(GpuStatistics, GradientsOfZerosAloneAreAllCounted) {
  const std::vector<kernel_tensor> tensors = test::gradients_in_groups(2);
  std::vector<operand_set> contents = test::random_contents(tensors, 48);
  test::plant_zeros(tensors, contents, 1);
  expect_same_for_all_options(tensors, contents, 2);
}

TEST_F(GpuStatistics, HugeAndTinyGradientsAddAlike) {
  std::vector<kernel_tensor> tensors;
  std::vector<operand_set> contents;
  test::integer_generator random(44);
  for (const int lowest : {-126, -60, -42, 38, 60, 110}) {
    tensors.push_back({{}, 3000, 0, 0});
    std::vector<float> values(3000);
    for (float& value : values) value = random.signed_value(lowest, lowest + 8);
    operand_set operands = test::random_operands({}, 3000, random);
    operands[test::gradient_operand] = test::encode(storage_format::f32, values);
    contents.push_back(operands);
  }
  expect_same_for_all_options(tensors, contents, 1);
}

TEST_F(GpuStatistics, LongListsHaveTheBitsOfTheHostLoop) {
  expect_same_for_long_lists(test::list_lengths);
}
TEST_F(GpuLargeStatistics, LongerListsHaveTheBitsOfTheHostLoop) {
  expect_same_for_long_lists(test::larger_list_lengths);
}

TEST_F(GpuStatistics, LongListsOfWholeChunksHaveTheBitsOfTheHostLoop) {
  expect_same_for_one_format(std::array{5000u, 20'001u}, true);
}
TEST_F(GpuStatistics, LongListsOfPartsOfChunksHaveTheBitsOfTheHostLoop) {
  expect_same_for_one_format(std::array{3001u, 20'001u}, false);
}
// Of one chunk of zeros, again and again.
TEST_F(GpuLargeStatistics, MoreZerosAreCountedThan32BitsHold) {
  constexpr std::uint64_t count = (1u << 21) + 1;
  const device_buffer<float> gradient(std::vector<float>(chunk_elements, 0.0f));
  tensor_descriptor tensor;
  tensor.numel = chunk_elements;
  tensor.gradient = gradient.data();
  const device_buffer<tensor_descriptor> tensors(std::vector{tensor});
  const device_buffer<chunk_descriptor> chunks(std::vector<chunk_descriptor>(count, {0, 0}));
  const statistics_table_view table = {tensors.data(), chunks.data(), count};
  const host_block block(1);
  const device_block found(block);
  const device_workspace workspace(count);
  check(cuda::launch_grad_stats(table, {norm_kind::l2, true}, workspace.view(), found.view(), {},
                                launch_order::full, stream().get()));
  EXPECT_EQ(found.read().scalars.zeros, count * chunk_elements);
  const device_block apart(block);
  const device_workspace workspace_apart(count);
  const device_buffer<double> totals(2);
  check(cuda::launch_grad_totals(table, {norm_kind::l2, true}, workspace_apart.view(), apart.view(),
                                 totals.data(), launch_order::full, stream().get()));
  EXPECT_EQ(totals.read(), (std::vector{0.0, static_cast<double>(count * chunk_elements)}));
}
TEST_F(GpuLargeStatistics, LongerListsOfWholeChunksHaveTheBitsOfTheHostLoop) {
  expect_same_for_one_format(std::array{262'901u}, true);
}

TEST_F(GpuStatistics, OneElementThatIsNotFiniteIsFoundAnywhere) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const storage_format gradient :
       {storage_format::f32, storage_format::f16, storage_format::bf16}) {
    update_signature signature;
    signature.gradient = gradient;
    const std::vector<kernel_tensor> tensors = {{signature, 4100, 0, 0}, {signature, 2049, 0, 1}};
    for (const float value : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
      for (const std::uint64_t position : {0u, 2047u, 2048u}) {
        std::vector<operand_set> contents = test::random_contents(tensors, 45);
        const operand_bytes bad = test::encode(gradient, std::span(&value, 1));
        std::memcpy(contents[1][test::gradient_operand].data() + position * bad.size(), bad.data(),
                    bad.size());
        const device_tensors on_device(tensors, contents);
        for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
          host_block start(2);
          start.step.norm = norm;
          const device_block block(start);
          const device_workspace workspace(on_device.table().chunk_count);
          check(cuda::launch_grad_stats(on_device.statistics_table(), {norm}, workspace.view(),
                                        block.view(), {}, launch_order::full, stream().get()));
          const host_block found = block.read();
          EXPECT_EQ(found.scalars.skip, 1u) << name_of(gradient) << " " << value << " " << position;
          EXPECT_EQ(found.scalars.skipped, 1u);
          EXPECT_EQ(found.progress[1].step, 0u);
        }
      }
    }
  }
}

}  // namespace
}  // namespace stepgraph
