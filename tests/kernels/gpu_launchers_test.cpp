#include <gtest/gtest.h>

#include <vector>

#include "kernels/device_problem.hpp"

// The update against the host loop of the same name, bit for bit.
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
using test::operand_set;

/// Every tuned signature, and some that the generic kernel serves; the conformance suite has all.
std::vector<update_signature> tested_signatures() {
  using enum storage_format;
  std::vector<update_signature> signatures = test::tuned_signatures();
  signatures.push_back({f32, f16, f16, f16, f16, f16});
  signatures.push_back({bf16, f32, none, e4m3, e4m3, e4m3});
  signatures.push_back({e4m3, bf16, none, bf16, e4m3});
  signatures.push_back({e5m2, f32, none, f32, f32, f32});
  signatures.push_back({e5m2, bf16, f16, e4m3, f16});
  signatures.push_back({f16, f16, none, f32, bf16, bf16});
  return signatures;
}

class GpuLaunchers : public test::launcher_test {};

TEST_F(GpuLaunchers, UpdateGivesTheBitsOfTheHostLoop) {
  for (const update_signature& signature : tested_signatures()) {
    SCOPED_TRACE(name_of(signature));
    const std::vector<kernel_tensor> tensors = {
        {signature, 5, 0, 0},    {signature, 4096, 1, 0}, {signature, 2049, 2, 0},
        {signature, 4097, 0, 1}, {signature, 6000, 1, 2}, {signature, 2048, 2, 3},
    };
    const std::vector<operand_set> contents = test::random_contents(tensors, 41);
    for (const gradient_store gradients :
         {gradient_store::keep, gradient_store::zero, gradient_store::unscaled}) {
      host_block block(3);
      block.groups[1].flags |= group_maximize;
      block.scalars.next_loss_scale.scale = 3.0f;
      test::advance_unmeasured(block);
      const device_block on_device(block);
      const host_tensors expected(tensors, contents);
      host::update(expected.host_table(), block.view(), {.gradients = gradients});

      const device_tensors found(tensors, contents);
      check(cuda::launch_update(signature, found.table(), on_device.view(),
                                {.gradients = gradients}, launch_order::full, stream().get()));
      EXPECT_EQ(found.read(), expected.buffers);
    }
  }
}

// Every kernel has the block that does.
TEST_F(GpuLaunchers, UpdateWritesTheRecordBesideItsChunks) {
  constexpr std::uint32_t capacity = 3;
  for (const update_signature& signature : tested_signatures()) {
    SCOPED_TRACE(name_of(signature));
    const std::vector<kernel_tensor> tensors = {{signature, 4097, 0, 0}, {signature, 8192, 1, 0}};
    const std::vector<operand_set> contents = test::random_contents(tensors, 43);
    const host_tensors expected(tensors, contents);
    const device_tensors found(tensors, contents);
    host_block block(200);
    std::vector<std::uint64_t> records(
        capacity * words_of_record(static_cast<std::uint32_t>(block.groups.size())));
    const device_buffer<std::uint64_t> records_there(records);
    block.records = {records.data(), capacity};
    for (int step = 0; step < 5; ++step) {
      test::advance_unmeasured(block);
      const device_block on_device(block, {records_there.data(), capacity});
      host::update(expected.host_table(), block.view(), {});
      check(cuda::launch_update(signature, found.table(), on_device.view(), {}, launch_order::full,
                                stream().get()));
      EXPECT_EQ(found.read(), expected.buffers) << step;
      EXPECT_TRUE(test::same_bits(records_there.read(), records)) << step;
    }
  }
}

TEST_F(GpuLaunchers, SkippedUpdateTouchesNothing) {
  for (const update_signature& signature : tested_signatures()) {
    const std::vector<kernel_tensor> tensors = {{signature, 2048, 0, 0}, {signature, 77, 0, 1}};
    const std::vector<operand_set> contents = test::random_contents(tensors, 42);
    host_block block(1);
    block.scalars.skip = 1;
    const device_block on_device(block);
    const device_tensors found(tensors, contents);
    check(cuda::launch_update(signature, found.table(), on_device.view(), {}, launch_order::full,
                              stream().get()));
    EXPECT_EQ(found.read(), host_tensors(tensors, contents).buffers) << name_of(signature);
  }
}

// Steps back to back whose kernels overlap their prologues, many times: a missing wait shows as a
// changed bit sooner or later.
TEST_F(GpuLaunchers, ProgrammaticOrderKeepsTheBitsOverManySteps) {
  const update_signature signature;
  std::vector<kernel_tensor> tensors;
  for (int i = 0; i < 40; ++i)
    tensors.push_back({signature, 4096, static_cast<std::uint32_t>(i % 3), 0});
  const std::vector<operand_set> contents = test::random_contents(tensors, 47);
  host_block block(3);
  block.step.max_grad_norm = 1.0;
  const device_block found(block);
  const host_tensors expected(tensors, contents);
  const device_tensors on_device(tensors, contents);
  const device_workspace workspace(expected.chunks.size());
  for (int step = 0; step < 50; ++step) {
    test::measure_and_advance(block, expected.host_statistics_table());
    host::update(expected.host_table(), block.view(), {});
    check(cuda::launch_grad_stats(on_device.statistics_table(), {}, workspace.view(), found.view(),
                                  {}, launch_order::full, stream().get()));
    check(cuda::launch_update(signature, on_device.table(), found.view(), {},
                              launch_order::programmatic, stream().get()));
  }
  test::expect_same_block(found.read(), block);
  EXPECT_EQ(on_device.read(), expected.buffers);
}

TEST_F(GpuLaunchers, TunedUpdateKernelsUseNoLocalMemory) {
  for (const update_signature& signature : tested_signatures()) {
    cuda::kernel_resources resources;
    check(cuda::update_kernel_resources(signature, &resources));
    EXPECT_EQ(resources.local_bytes, 0u) << name_of(signature);
    EXPECT_EQ(resources.threads_per_block, static_cast<int>(update_threads));
    EXPECT_GE(resources.max_blocks_per_multiprocessor, 2) << name_of(signature);
  }
}

}  // namespace
}  // namespace stepgraph
