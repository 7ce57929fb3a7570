#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "common/expect_error.hpp"
#include "conformance/foreign_kernels.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/error.hpp"

// Foreign work in the body of a conditional node: a skipped step leaves it out.
namespace stepgraph::test {
namespace {

using ::testing::ElementsAre;

class GpuOnlyIfApplied : public gpu_test {
 protected:
  /// Makes the next steps skipped, or not.
  static void set_gradient(const ones_on_device& tensor, float value) {
    tensor.gradient.write(std::vector<float>(tensor.numel, value));
  }
  static constexpr float infinity = std::numeric_limits<float>::infinity();

  /// What a launch of `steps` steps logs whose foreign work forks to one stream again and again: a
  /// stream belongs to the capture that it was forked from until that ends.
  static std::vector<std::uint32_t> log_of_forks(std::uint32_t steps) {
    const ones_on_device tensor;
    const device_log log;
    const cuda_stream stream;
    const cuda_stream side;
    const cuda::unique_event forked = cuda::make_event();
    const cuda::unique_event joined = cuda::make_event();
    const auto work = [&](std::uint32_t entry) {
      return [&, entry](cudaStream_t on) {
        check(cudaEventRecord(forked.get(), on));
        check(cudaStreamWaitEvent(side.get(), forked.get(), 0));
        log.append(entry, side.get());
        check(cudaEventRecord(joined.get(), side.get()));
        check(cudaStreamWaitEvent(on, joined.get(), 0));
      };
    };
    graph_executor executor(plan_with(tensor, {{"1", foreign_order::before, "grad_stats"},
                                               {"2", foreign_order::after, "grad_stats", true},
                                               {"3", foreign_order::after, f32_update, true},
                                               {"4", foreign_order::after, f32_update}}),
                            stream.get(),
                            {{"1", work(1)}, {"2", work(2)}, {"3", work(3)}, {"4", work(4)}},
                            {.steps_per_launch = steps});
    executor.launch(stream.get());
    stream.synchronize();
    return log.read();
  }
};

TEST_F(GpuOnlyIfApplied, SkippedStepLeavesItOutAndOtherWorkRuns) {
  const ones_on_device tensor;
  const device_log log;
  const cuda_stream stream;
  graph_executor executor(
      plan_with(tensor, {{"1", foreign_order::after, "grad_stats", true},
                         {"2", foreign_order::after, "grad_stats"},
                         {"3", foreign_order::after, f32_update, true},
                         {"4", foreign_order::after, f32_update}}),
      stream.get(),
      {{"1", log.entry(1)}, {"2", log.entry(2)}, {"3", log.entry(3)}, {"4", log.entry(4)}});
  executor.launch(stream.get());
  stream.synchronize();
  set_gradient(tensor, infinity);
  executor.launch(stream.get());
  executor.launch(stream.get());
  stream.synchronize();
  set_gradient(tensor, 1.0f);
  executor.launch(stream.get());
  EXPECT_THAT(log.read(), ElementsAre(1, 2, 3, 4, 2, 4, 2, 4, 1, 2, 3, 4));
  const step_status status = executor.status();
  EXPECT_EQ(status.step, 2u);
  EXPECT_EQ(status.skipped, 2u);
  EXPECT_NEAR(tensor.first_parameter(), 0.8, 1e-5);
}

TEST_F(GpuOnlyIfApplied, WorksWhereNothingIsMeasured) {
  const ones_on_device tensor;
  const device_log log;
  const cuda_stream stream;
  const device_buffer<float> found_inf(std::vector<float>{0.0f});
  graph_executor executor(plan_with(tensor, {{"mean", foreign_order::after, "advance_step", true}},
                                    {.found_inf_input = found_inf.data()}),
                          stream.get(), {{"mean", log.entry(1)}});
  executor.launch(stream.get());
  stream.synchronize();
  found_inf.write(std::vector<float>{1.0f});
  executor.launch(stream.get());
  EXPECT_THAT(log.read(), ElementsAre(1));
}

TEST_F(GpuOnlyIfApplied, NodesAroundItSeeItsWholeWork) {
  const ones_on_device tensor(1 << 20);
  const cuda_stream stream;
  graph_executor executor(plan_with(tensor, {{"erase", foreign_order::after, "grad_stats", true}}),
                          stream.get(), {{"erase", [&](cudaStream_t work) {
                                            fill_slowly_async(tensor.gradient.data(), tensor.numel,
                                                              0.0f, 200, work);
                                          }}});
  executor.launch(stream.get());
  stream.synchronize();
  for (const float value : tensor.parameter.read()) ASSERT_EQ(value, 1.0f);
}

TEST_F(GpuOnlyIfApplied, EmptyBodyAndForksInTheBodyAreLegal) {
  const ones_on_device tensor(1 << 18);
  const cuda_stream stream;
  const cuda_stream side;
  const cuda::unique_event forked = cuda::make_event();
  const cuda::unique_event joined = cuda::make_event();
  graph_executor executor(
      plan_with(tensor, {{"nothing", foreign_order::after, "grad_stats", true},
                         {"fork", foreign_order::after, "grad_stats", true}}),
      stream.get(),
      {{"nothing", [](cudaStream_t) {}},
       {"fork", [&](cudaStream_t work) {
          const std::uint64_t half = tensor.numel / 2;
          check(cudaEventRecord(forked.get(), work));
          check(cudaStreamWaitEvent(side.get(), forked.get(), 0));
          fill_slowly_async(tensor.gradient.data(), half, 0.0f, 100, side.get());
          check(cudaMemsetAsync(tensor.gradient.data() + half, 0, half * sizeof(float), work));
          check(cudaEventRecord(joined.get(), side.get()));
          check(cudaStreamWaitEvent(work, joined.get(), 0));
        }}});
  executor.launch(stream.get());
  stream.synchronize();
  for (const float value : tensor.parameter.read()) ASSERT_EQ(value, 1.0f);
  const std::vector<graph_node_info> nodes = executor.nodes();
  ASSERT_EQ(nodes.size(), 4u);
  EXPECT_EQ(nodes[1].graph_nodes, 0u);
  EXPECT_EQ(nodes[2].graph_nodes, 2u);
  EXPECT_TRUE(nodes[1].only_if_applied);
  EXPECT_TRUE(nodes[2].only_if_applied);
  EXPECT_FALSE(nodes[3].programmatic);
}

TEST_F(GpuOnlyIfApplied, StreamsMayBeForkedToInTheStepAndInBodies) {
  EXPECT_THAT(log_of_forks(1), ElementsAre(1, 2, 3, 4));
}
TEST_F(GpuOnlyIfApplied, StreamsMayBeForkedToInALoop) {
  EXPECT_THAT(log_of_forks(2), ElementsAre(1, 2, 3, 4, 1, 2, 3, 4));
}

TEST_F(GpuOnlyIfApplied, WhatABodyCannotHoldIsRefusedByName) {
  const ones_on_device tensor;
  const cuda_stream stream;
  const step_plan plan = plan_with(tensor, {{"mean", foreign_order::after, f32_update, true}});
  const std::pair<const char*, std::function<void(cudaStream_t)>> works[] = {
      {"host function",
       [](cudaStream_t work) {
         (void)cudaLaunchHostFunc(
             work, [](void*) {}, nullptr);
       }},
      {"allocation",
       [](cudaStream_t work) {
         void* memory = nullptr;
         if (cudaMallocAsync(&memory, 64, work) == cudaSuccess) (void)cudaFreeAsync(memory, work);
       }},
  };
  for (const auto& [what, work] : works) {
    SCOPED_TRACE(what);
    expect_error<capture_error>(
        [&, &forbidden = work] {
          graph_executor executor(plan, stream.get(), {{"mean", forbidden}});
        },
        {"'mean'"});
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  graph_executor executor(plan, stream.get(), {{"mean", [](cudaStream_t) {}}});
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.9, 1e-5);
}

TEST_F(GpuOnlyIfApplied, ValuesSetByHandArriveBesideIt) {
  const ones_on_device tensor;
  const device_log log;
  const cuda_stream stream;
  graph_executor executor(plan_with(tensor, {{"mean", foreign_order::after, f32_update, true}}),
                          stream.get(), {{"mean", log.entry(1)}});
  executor.launch(stream.get());
  executor.set_learning_rate(0, 0.2);
  executor.launch(stream.get());
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.5, 1e-5);
  EXPECT_EQ(log.read().size(), 3u);
  EXPECT_EQ(executor.instantiations(), 1u);
}

TEST_F(GpuOnlyIfApplied, StreamExecutorRefusesItAndSaysWhatDoes) {
  const ones_on_device tensor;
  const cuda_stream stream;
  expect_error<usage_error>(
      [&] {
        stream_executor executor(
            plan_with(tensor, {{"mean", foreign_order::after, f32_update, true}}), stream.get(),
            {{"mean", [](cudaStream_t) {}}});
      },
      {"'mean'", "only_if_applied", "graph_executor"});
}

}  // namespace
}  // namespace stepgraph::test
