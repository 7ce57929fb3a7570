#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/expect_error.hpp"
#include "conformance/foreign_kernels.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/error.hpp"

// Several steps a launch: the step as the body of a loop on the device.
namespace stepgraph::test {
namespace {

using ::testing::ElementsAre;

constexpr const char* renew = "renew";

/// Foreign work that adds to the gradient before each step.
foreign_work adding(const ones_on_device& tensor, float value) {
  return {{renew, [&tensor, value](cudaStream_t stream) {
             add_async(tensor.gradient.data(), tensor.numel, value, stream);
           }}};
}

step_plan plan_of(const ones_on_device& tensor,
                  const step_options& options = {.max_grad_norm = 50.0},
                  const group_options& group = {.learning_rate = 0.01, .weight_decay = 0.1}) {
  return plan_with(tensor, {{renew, foreign_order::before, "grad_stats"}}, options, group);
}

class GpuLoop : public gpu_test {};

TEST_F(GpuLoop, GivesTheBitsOfAsManyLaunches) {
  const ones_on_device one(5000);
  const ones_on_device several(5000);
  const cuda_stream stream;
  graph_executor reference(plan_of(one), stream.get(), adding(one, 0.125f));
  graph_executor executor(plan_of(several), stream.get(), adding(several, 0.125f),
                          {.steps_per_launch = 5});
  for (int launch = 0; launch < 4; ++launch) {
    executor.launch(stream.get());
    for (int step = 0; step < 5; ++step) reference.launch(stream.get());
    EXPECT_EQ(executor.status().step, 5u * (static_cast<unsigned>(launch) + 1));
    EXPECT_EQ(executor.status().grad_norm, reference.status().grad_norm);
    EXPECT_EQ(several.parameter.read(), one.parameter.read());
    EXPECT_EQ(several.exp_avg.read(), one.exp_avg.read());
    EXPECT_EQ(several.exp_avg_sq.read(), one.exp_avg_sq.read());
  }
}

TEST_F(GpuLoop, RunsWithoutForeignWorkAndWithoutStatistics) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get(), {}, {.steps_per_launch = 3});
  executor.launch(stream.get());
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.4, 1e-5);
  EXPECT_EQ(executor.status().step, 6u);
}

TEST_F(GpuLoop, LaunchesInARowEachRunAllTheirSteps) {
  const ones_on_device tensor;
  const cuda_stream first;
  const cuda_stream second;
  graph_executor executor(tensor.plan({.learning_rate = 0.001}), first.get(), {},
                          {.steps_per_launch = 7});
  first.synchronize();
  for (int launch = 0; launch < 20; ++launch) {
    executor.launch(launch % 3 == 0 ? second.get() : first.get());
  }
  EXPECT_EQ(executor.status().step, 140u);
  EXPECT_NEAR(tensor.first_parameter(), 0.86, 1e-4);
}

TEST_F(GpuLoop, ValuesSetByHandReachTheWholeNextLaunchOnce) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get(), {}, {.steps_per_launch = 3});
  executor.launch(stream.get());
  executor.set_learning_rate(0, 0.2);
  executor.set_step(100);
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 1.0 - 0.3 - 0.6, 1e-5);
  // Applied at every step, 100 would come back each time; replayed, at every launch.
  EXPECT_EQ(executor.status().step, 103u);
  executor.launch(stream.get());
  EXPECT_EQ(executor.status().step, 106u);
  EXPECT_EQ(executor.instantiations(), 1u);
}

TEST_F(GpuLoop, MoreValuesThanTravelInlineArrive) {
  std::vector<ones_on_device> tensors(20);
  step_builder builder;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const group_id group = builder.add_group({.learning_rate = 0.1});
    builder.add_tensor(group, tensors[t].operands("tensor " + std::to_string(t)));
  }
  const cuda_stream stream;
  graph_executor executor(builder.build(), stream.get(), {}, {.steps_per_launch = 2});
  for (group_id group = 0; group < tensors.size(); ++group) {
    executor.set_learning_rate(group, 0.01 * group);
  }
  executor.launch(stream.get());
  stream.synchronize();
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    EXPECT_NEAR(tensors[t].first_parameter(), 1.0 - 0.02 * static_cast<double>(t), 1e-5);
  }
}

TEST_F(GpuLoop, ReboundOperandsReachTheNextLaunch) {
  const ones_on_device tensor;
  const ones_on_device other;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get(), {}, {.steps_per_launch = 2});
  executor.launch(stream.get());
  executor.rebind(0, operand_kind::parameter, other.parameter.data());
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.8, 1e-5);
  EXPECT_NEAR(other.first_parameter(), 0.8, 1e-5);
}

TEST_F(GpuLoop, EachStepWritesItsRecord) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(plan_of(tensor, {.measure_norm = true, .record_capacity = 16}),
                          stream.get(), adding(tensor, 1.0f), {.steps_per_launch = 4});
  executor.launch(stream.get());
  executor.launch(stream.get());
  stream.synchronize();
  const record_batch batch = executor.read_records();
  EXPECT_EQ(batch.overwritten, 0u);
  ASSERT_EQ(batch.records.size(), 8u);
  for (std::size_t i = 0; i < batch.records.size(); ++i) {
    EXPECT_EQ(batch.records[i].step, i + 1);
    EXPECT_EQ(batch.records[i].grad_norm, static_cast<double>(i) + 2.0);
  }
}

TEST_F(GpuLoop, SkippedStepsCountAndLeaveConditionalWorkOut) {
  const ones_on_device tensor;
  const device_log log;
  const cuda_stream stream;
  const device_buffer<float> infinity(std::vector<float>{std::numeric_limits<float>::infinity()});
  // From 1 on by 1: the steps with the gradients 2 and 3 are applied, the two after them skipped.
  graph_executor executor(
      plan_with(tensor,
                {{renew, foreign_order::before, "grad_stats"},
                 {"mean", foreign_order::after, f32_update, true},
                 {"all", foreign_order::after, f32_update}},
                {.skip_above_norm = 3.5}),
      stream.get(),
      {{renew,
        [&](cudaStream_t work) { add_async(tensor.gradient.data(), tensor.numel, 1.0f, work); }},
       {"mean", log.entry(1)},
       {"all", log.entry(2)}},
      {.steps_per_launch = 4});
  executor.launch(stream.get());
  EXPECT_THAT(log.read(), ElementsAre(1, 2, 1, 2, 2, 2));
  EXPECT_EQ(executor.status().step, 2u);
  EXPECT_EQ(executor.status().skipped, 2u);
}

TEST_F(GpuLoop, WhatABodyCannotHoldIsRefusedByName) {
  const ones_on_device tensor;
  const cuda_stream stream;
  expect_error<capture_error>(
      [&] {
        graph_executor executor(plan_of(tensor), stream.get(),
                                {{renew,
                                  [](cudaStream_t work) {
                                    (void)cudaLaunchHostFunc(
                                        work, [](void*) {}, nullptr);
                                  }}},
                                {.steps_per_launch = 2});
      },
      {"'renew'"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  // One step a launch may hold it.
  graph_executor executor(plan_of(tensor), stream.get(), {{renew, [](cudaStream_t work) {
                                                             check(cudaLaunchHostFunc(
                                                                 work, [](void*) {}, nullptr));
                                                           }}});
  executor.launch(stream.get());
  EXPECT_EQ(executor.status().step, 1u);
}

TEST_F(GpuLoop, NoStepsAreRefused) {
  const ones_on_device tensor;
  const cuda_stream stream;
  expect_error<usage_error>(
      [&] { graph_executor executor(tensor.plan(), stream.get(), {}, {.steps_per_launch = 0}); },
      {"steps_per_launch", "0"});
}

TEST_F(GpuLoop, NodesAreThoseOfThePlan) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(plan_of(tensor), stream.get(), adding(tensor, 0.0f),
                          {.steps_per_launch = 2});
  const std::vector<graph_node_info> nodes = executor.nodes();
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].graph_nodes, 1u);
  EXPECT_NE(nodes[1].function.find("grad_stats_kernel"), std::string::npos);
  EXPECT_NE(nodes[2].function.find("update_kernel"), std::string::npos);
}

TEST_F(GpuLoop, ReleaseWaitsForAllSteps) {
  const ones_on_device tensor(1 << 20);
  const cuda_stream stream;
  graph_executor executor(tensor.plan({.learning_rate = 0.001}), stream.get(), {},
                          {.steps_per_launch = 100});
  executor.launch(stream.get());
  executor.release();
  for (const float value : tensor.parameter.read()) ASSERT_NEAR(value, 0.9, 1e-4);
}

}  // namespace
}  // namespace stepgraph::test
