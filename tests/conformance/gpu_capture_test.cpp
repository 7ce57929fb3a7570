#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <optional>
#include <set>
#include <thread>

#include "common/executor_adapter.hpp"
#include "common/expect_error.hpp"
#include "common/instantiate.hpp"
#include "common/ones_on_device.hpp"
#include "common/stream_gate.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/kernels/launch_shape.hpp"

// What only CUDA executors do: capture, streams, devices, lifetimes.
namespace stepgraph::test {
namespace {

std::set<cudaGraphNodeType> node_types(const cuda::unique_graph& graph) {
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph.get(), nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph.get(), nodes.data(), &count));
  std::set<cudaGraphNodeType> types;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    check(cudaGraphNodeGetType(node, &type));
    types.insert(type);
  }
  return types;
}

class GpuGraphExecutor : public gpu_test {};

TEST_F(GpuGraphExecutor, A16_NodesDoNotDependOnTheNumberOfGroups) {
  const ones_on_device first;
  const cuda_stream stream;
  graph_executor one_group(first.plan({}, {.skip_non_finite = true}), stream.get());

  std::vector<ones_on_device> tensors(465);
  step_builder builder;
  builder.set_options({.skip_non_finite = true});
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const group_id group = builder.add_group({.learning_rate = 1e-3 * static_cast<double>(t)});
    builder.add_tensor(group, tensors[t].operands("tensor " + std::to_string(t)));
  }
  graph_executor many_groups(builder.build(), stream.get());
  ASSERT_EQ(many_groups.nodes().size(), one_group.nodes().size());
  ASSERT_EQ(many_groups.nodes().size(), 2u);
  EXPECT_EQ(many_groups.nodes()[0].name, "grad_stats");
  EXPECT_EQ(many_groups.nodes()[1].name, "update/f32/f32/none/f32/f32");
  EXPECT_NE(many_groups.nodes()[1].function.find("update_kernel"), std::string::npos);
  EXPECT_EQ(many_groups.nodes()[1].blocks, 465u * update_blocks_per_chunk);
}

TEST_F(GpuGraphExecutor, NodesFollowThePlan) {
  const ones_on_device tensor(10000);
  const cuda_stream stream;
  const step_plan plan = tensor.plan();
  graph_executor executor(plan, stream.get());
  const std::vector<graph_node_info> nodes = executor.nodes();
  ASSERT_EQ(nodes.size(), plan.nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    EXPECT_EQ(nodes[i].name, plan.nodes[i].name);
    EXPECT_EQ(nodes[i].blocks, plan.nodes[i].blocks);
    EXPECT_EQ(nodes[i].threads, plan.nodes[i].threads);
  }
}

TEST_F(GpuGraphExecutor, ConstructionRunsNoStep) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  EXPECT_EQ(executor.status().step, 0u);
  expect_updates(tensor, 0);
}

TEST_F(GpuGraphExecutor, A25_SettersAndRebindingNeverInstantiateAgain) {
  const ones_on_device tensor;
  const ones_on_device other;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  const std::uint64_t before = executor.instantiations();
  for (int step = 0; step < 10; ++step) {
    executor.set_learning_rate(0, 0.1);
    executor.set_betas(0, 0.9, 0.999);
    executor.rebind(0, operand_kind::parameter,
                    step % 2 == 0 ? other.parameter.data() : tensor.parameter.data());
    executor.launch(stream.get());
  }
  EXPECT_EQ(executor.instantiations(), before);
  expect_updates(tensor, 5);
  expect_updates(other, 5);
}

TEST_F(GpuGraphExecutor, A07_CaptureIsNotDisturbedByAnotherThread) {
  std::atomic<bool> stop = false;
  std::atomic<int> rounds = 0;
  std::string error_of_other_thread;
  std::thread other([&] {
    try {
      const cuda_stream stream;
      const cuda::unique_event event = cuda::make_event();
      while (!stop) {
        void* memory = nullptr;
        check(cudaHostAlloc(&memory, 4096, cudaHostAllocDefault));
        check(cudaEventRecord(event.get(), stream.get()));
        while (cudaEventQuery(event.get()) == cudaErrorNotReady) {
        }
        check(cudaEventQuery(event.get()));
        check(cudaFreeHost(memory));
        ++rounds;
      }
    } catch (const std::exception& error) {
      error_of_other_thread = error.what();
    }
  });
  const ones_on_device tensor;
  const cuda_stream stream;
  int built = 0;
  try {
    while (rounds == 0 && error_of_other_thread.empty()) std::this_thread::yield();
    for (; built < 100; ++built) {
      graph_executor executor(tensor.plan(), stream.get());
      executor.launch(stream.get());
      stream.synchronize();
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << "capture " << built << ": " << error.what();
  }
  stop = true;
  other.join();
  EXPECT_EQ(error_of_other_thread, "");
  EXPECT_EQ(built, 100);
}

TEST_F(GpuGraphExecutor, LaunchOnACapturingStreamIsRefusedAndTheCaptureSurvives) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  stream.synchronize();
  cuda::capture_scope capture(stream.get());
  check(cudaMemsetAsync(tensor.exp_avg.data(), 0, sizeof(float), stream.get()));
  expect_error<capture_error>([&] { executor.launch(stream.get()); }, {"captur"});
  check(cudaMemsetAsync(tensor.exp_avg_sq.data(), 0, sizeof(float), stream.get()));
  const cuda::unique_graph graph = capture.finish();
  std::size_t nodes = 0;
  check(cudaGraphGetNodes(graph.get(), nullptr, &nodes));
  EXPECT_EQ(nodes, 2u);
  executor.launch(stream.get());
  expect_updates(tensor, 1);
}

TEST_F(GpuGraphExecutor, RefusedLaunchKeepsWhatWasSet) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  executor.set_learning_rate(0, 0.2);
  stream.synchronize();
  {
    cuda::capture_scope capture(stream.get());
    EXPECT_THROW(executor.launch(stream.get()), capture_error);
  }
  executor.launch(stream.get());
  expect_updates(tensor, 2);
}

TEST_F(GpuGraphExecutor, LaunchesOnDifferentStreamsRunOneAfterTheOther) {
  // Large enough that an overlap of two steps would show.
  const ones_on_device tensor(1 << 20);
  const cuda_stream first;
  const cuda_stream second;
  graph_executor executor(tensor.plan({.learning_rate = 0.01}), first.get());
  first.synchronize();
  for (int step = 0; step < 40; ++step) {
    executor.set_learning_rate(0, step % 2 == 0 ? 0.01 : 0.005);
    executor.launch(step % 2 == 0 ? first.get() : second.get());
  }
  first.synchronize();
  second.synchronize();
  EXPECT_EQ(executor.status().step, 40u);
  for (const float value : tensor.parameter.read()) ASSERT_NEAR(value, 0.7, 1e-4);
}

TEST_F(GpuGraphExecutor, RebindingOnAnotherStreamDoesNotOvertakeAReplay) {
  const ones_on_device tensor(1 << 22);
  const ones_on_device other(1 << 22);
  const cuda_stream first;
  const cuda_stream second;
  graph_executor executor(tensor.plan(), first.get());
  first.synchronize();
  executor.launch(first.get());
  executor.rebind(0, operand_kind::parameter, other.parameter.data());
  executor.launch(second.get());
  second.synchronize();
  for (const ones_on_device* updated : {&tensor, &other}) {
    for (const float value : updated->parameter.read()) ASSERT_NEAR(value, 0.9, 1e-6);
  }
}

TEST_F(GpuGraphExecutor, LaunchOnTheLegacyDefaultStreamWorks) {
  const ones_on_device tensor;
  graph_executor executor(tensor.plan(), nullptr);
  executor.launch(nullptr);
  executor.set_learning_rate(0, 0.2);
  executor.launch(nullptr);
  expect_updates(tensor, 3);
}

TEST_F(GpuGraphExecutor, ReleaseTwiceThenEveryCallIsRefused) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(
      tensor.plan({.learning_rate = 0.1}, {.skip_non_finite = true, .max_grad_norm = 10.0}),
      stream.get());
  executor.launch(stream.get());
  executor.release();
  executor.release();
  expect_updates(tensor, 1);
  const std::vector<std::string> words = {"released"};
  expect_error<usage_error>([&] { executor.launch(stream.get()); }, words);
  expect_error<usage_error>([&] { executor.status(); }, words);
  expect_error<usage_error>([&] { executor.set_learning_rate(0, 0.1); }, words);
  expect_error<usage_error>([&] { executor.set_weight_decay(0, 0.1); }, words);
  expect_error<usage_error>([&] { executor.set_betas(0, 0.9, 0.99); }, words);
  expect_error<usage_error>([&] { executor.set_eps(0, 0.1); }, words);
  expect_error<usage_error>([&] { executor.set_group_step(0, 1); }, words);
  expect_error<usage_error>([&] { executor.set_step(1); }, words);
  expect_error<usage_error>([&] { executor.set_loss_scale(2.0); }, words);
  expect_error<usage_error>([&] { executor.set_max_grad_norm(2.0); }, words);
  expect_error<usage_error>([&] { executor.set_skip_above_norm(2.0); }, words);
  expect_error<usage_error>([&] { executor.set_samples_per_step(2); }, words);
  expect_error<usage_error>([&] { executor.loss_scale_address(); }, words);
  expect_error<usage_error>([&] { executor.totals_address(); }, words);
  step_status state;
  state.groups.resize(1);
  expect_error<usage_error>([&] { executor.load_state(state); }, words);
  expect_error<usage_error>(
      [&] { executor.rebind(0, operand_kind::parameter, tensor.parameter.data()); }, words);
}

TEST_F(GpuGraphExecutor, MovedExecutorGoesOn) {
  const ones_on_device tensor;
  const ones_on_device other;
  const cuda_stream stream;
  graph_executor first(tensor.plan(), stream.get());
  first.launch(stream.get());
  first.set_learning_rate(0, 0.2);
  graph_executor second(std::move(first));
  second.launch(stream.get());
  expect_updates(tensor, 3);
  graph_executor third(other.plan(), stream.get());
  third.launch(stream.get());
  third = std::move(second);
  third.launch(stream.get());
  expect_updates(tensor, 5);
  expect_updates(other, 1);
}

TEST_F(GpuGraphExecutor, DestructionWaitsForItsLaunches) {
  const ones_on_device tensor(1 << 22);
  const cuda_stream stream;
  {
    graph_executor executor(tensor.plan(), stream.get());
    for (int step = 0; step < 20; ++step) {
      executor.set_learning_rate(0, 0.01);  // read by a launch that may start after the destructor
      executor.launch(stream.get());
    }
  }
  for (const float value : tensor.parameter.read()) ASSERT_NEAR(value, 0.8, 1e-4);
  check(cudaGetLastError());
}

TEST_F(GpuGraphExecutor, A24_FiftyExecutorsLeaveNoMemoryBehind) {
  const ones_on_device tensor(5000);
  const cuda_stream stream;
  const auto build_replay_drop = [&] {
    graph_executor executor(tensor.plan(), stream.get());
    for (int step = 0; step < 3; ++step) {
      executor.set_learning_rate(0, 0.1);
      executor.launch(stream.get());
    }
    stream.synchronize();
  };
  const auto free_bytes = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaDeviceSynchronize());
    check(cudaMemGetInfo(&free, &total));
    return static_cast<std::int64_t>(free);
  };
  for (int i = 0; i < 5; ++i) build_replay_drop();  // the driver's own pools fill once
  const std::int64_t before = free_bytes();
  for (int i = 0; i < 50; ++i) build_replay_drop();
  EXPECT_LE(before - free_bytes(), 4 << 20);
}

class GpuStreamExecutor : public gpu_test {};

TEST_F(GpuStreamExecutor, A24_CapturedStepHoldsKernelsAlone) {
  const ones_on_device tensor;
  const cuda_stream stream;
  stream_executor executor(tensor.plan({}, {.skip_non_finite = true}), stream.get());
  executor.set_learning_rate(0, 0.2);
  executor.rebind(0, operand_kind::gradient, tensor.gradient.data());
  cuda::capture_scope capture(stream.get());
  executor.launch(stream.get());
  const cuda::unique_graph graph = capture.finish();
  EXPECT_EQ(node_types(graph), std::set<cudaGraphNodeType>{cudaGraphNodeTypeKernel});
}

TEST_F(GpuStreamExecutor, CaptureRunsNothingAndLeavesSettingsPending) {
  const ones_on_device tensor;
  const cuda_stream stream;
  stream_executor executor(tensor.plan(), stream.get());
  executor.set_learning_rate(0, 0.2);
  std::optional<cuda::capture_scope> capture(std::in_place, stream.get());
  executor.launch(stream.get());
  const cuda::unique_graph_exec replayed = instantiate(capture->finish());
  EXPECT_EQ(executor.status().step, 0u);
  // Pending values are not delivered by a replay, nor by the capture.
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 1);
  executor.deliver_async(stream.get());
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 3);
}

TEST_F(GpuStreamExecutor, EagerLaunchesAndReplaysShareOneState) {
  const ones_on_device tensor;
  const cuda_stream stream;
  stream_executor executor(tensor.plan(), stream.get());
  cuda::capture_scope capture(stream.get());
  executor.launch(stream.get());
  const cuda::unique_graph_exec replayed = instantiate(capture.finish());
  for (int round = 0; round < 2; ++round) {
    executor.set_learning_rate(0, 0.1);
    executor.launch(stream.get());
    check(cudaGraphLaunch(replayed.get(), stream.get()));
    check(cudaGraphLaunch(replayed.get(), stream.get()));
  }
  stream.synchronize();
  expect_updates(tensor, 6);
  EXPECT_EQ(executor.status().step, 6u);
}

TEST_F(GpuStreamExecutor, ReboundOperandsReachReplaysAfterDelivery) {
  const ones_on_device tensor;
  const ones_on_device other;
  const cuda_stream stream;
  stream_executor executor(tensor.plan(), stream.get());
  cuda::capture_scope capture(stream.get());
  executor.launch(stream.get());
  const cuda::unique_graph_exec replayed = instantiate(capture.finish());
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  executor.rebind(0, operand_kind::parameter, other.parameter.data());
  executor.deliver_async(stream.get());
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 1);
  expect_updates(other, 1);
}

TEST_F(GpuStreamExecutor, StepIsPartOfACallersLargerGraph) {
  const ones_on_device tensor;
  const ones_on_device other;
  const cuda_stream stream;
  stream_executor first(tensor.plan(), stream.get());
  stream_executor second(other.plan({.learning_rate = 0.2}), stream.get());
  cuda::capture_scope capture(stream.get());
  // The gradient of the first step arrives inside the graph.
  check(cudaMemcpyAsync(tensor.gradient.data(), other.gradient.data(), sizeof(float),
                        cudaMemcpyDeviceToDevice, stream.get()));
  first.launch(stream.get());
  second.launch(stream.get());
  first.launch(stream.get());
  const cuda::unique_graph_exec replayed = instantiate(capture.finish());
  check(cudaMemset(tensor.gradient.data(), 0, sizeof(float)));
  check(cudaDeviceSynchronize());
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 4);
  expect_updates(other, 4);
}

TEST_F(GpuStreamExecutor, A26_ReplaysNeedNeitherTheGraphNorThePlan) {
  const ones_on_device tensor;
  const cuda_stream stream;
  std::optional<step_plan> plan(tensor.plan({.name = std::string(100, 'g'), .learning_rate = 0.1}));
  stream_executor executor(*plan, stream.get());
  plan->groups[0].learning_rate = 1e9;
  plan.reset();
  std::optional<cuda::capture_scope> capture(std::in_place, stream.get());
  executor.launch(stream.get());
  const cuda::unique_graph_exec replayed = instantiate(capture->finish());
  capture.reset();
  for (int replay = 0; replay < 3; ++replay) check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 3);
}

TEST_F(GpuStreamExecutor, DeliveryOnACapturingStreamIsRefusedAndTheCaptureSurvives) {
  const ones_on_device tensor;
  const cuda_stream stream;
  stream_executor executor(tensor.plan(), stream.get());
  executor.set_learning_rate(0, 0.2);
  std::optional<cuda::capture_scope> capture(std::in_place, stream.get());
  expect_error<capture_error>([&] { executor.deliver_async(stream.get()); }, {"captur"});
  executor.launch(stream.get());
  const cuda::unique_graph_exec replayed = instantiate(capture->finish());
  executor.deliver_async(stream.get());
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 2);
}

TEST_F(GpuStreamExecutor, ConstructionOnACapturingStreamIsRefused) {
  const ones_on_device tensor;
  const cuda_stream stream;
  std::optional<cuda::capture_scope> capture(std::in_place, stream.get());
  expect_error<capture_error>([&] { stream_executor(tensor.plan(), stream.get()); }, {"captur"});
  expect_error<capture_error>([&] { graph_executor(tensor.plan(), stream.get()); }, {"captur"});
  capture.reset();
  stream_executor executor(tensor.plan(), stream.get());
  executor.launch(stream.get());
  stream.synchronize();
  expect_updates(tensor, 1);
}

TEST_F(GpuStreamExecutor, MovedExecutorGoesOn) {
  const ones_on_device tensor;
  const cuda_stream stream;
  stream_executor first(tensor.plan(), stream.get());
  first.launch(stream.get());
  stream_executor second(std::move(first));
  second.set_learning_rate(0, 0.2);
  second.launch(stream.get());
  stream.synchronize();
  expect_updates(tensor, 3);
}

// Tools that serialise launches, such as compute-sanitizer, block by themselves: a suite apart.
class GpuUnblocked : public gpu_test {};

TEST_F(GpuUnblocked, SettersRebindingAndLaunchesDoNotWaitForARunningStep) {
  for (const bool graph : {false, true}) {
    SCOPED_TRACE(graph ? "graph" : "stream");
    const ones_on_device tensor;
    const ones_on_device other;
    const cuda_stream stream;
    std::optional<graph_executor> graph_run;
    std::optional<stream_executor> stream_run;
    if (graph) {
      graph_run.emplace(tensor.plan(), stream.get());
    } else {
      stream_run.emplace(tensor.plan(), stream.get());
    }
    executor& run = graph ? static_cast<executor&>(*graph_run) : *stream_run;
    const auto launch = [&] {
      if (graph) {
        graph_run->launch(stream.get());
      } else {
        stream_run->launch(stream.get());
      }
    };
    launch();
    stream.synchronize();
    stream_gate gate(stream.get());
    double tenths_of_tensor = 1.0;
    double tenths_of_other = 0.0;
    for (int step = 0; step < 50; ++step) {
      const bool to_other = step % 4 == 3;
      run.rebind(0, operand_kind::parameter,
                 to_other ? other.parameter.data() : tensor.parameter.data());
      run.set_learning_rate(0, 0.01 * (step % 3));
      launch();
      (to_other ? tenths_of_other : tenths_of_tensor) += 0.1 * (step % 3);
    }
    EXPECT_FALSE(gate.passed()) << "a call waited for the stream";
    gate.open();
    stream.synchronize();
    expect_updates(tensor, tenths_of_tensor);
    expect_updates(other, tenths_of_other);
  }
}

class GpuDevices : public gpu_test {
 protected:
  void SetUp() override {
    gpu_test::SetUp();
    if (IsSkipped()) return;
    if (device_count() < 2) GTEST_SKIP() << "needs two GPUs, found " << device_count();
    check(cudaSetDevice(0));
  }
  void TearDown() override {
    if (!IsSkipped()) check(cudaSetDevice(0));
  }
  static int current() {
    int device = -1;
    check(cudaGetDevice(&device));
    return device;
  }
};

TEST_F(GpuDevices, A32_ExecutorOfAnotherDeviceLeavesTheCurrentDeviceAlone) {
  check(cudaSetDevice(1));
  const ones_on_device tensor;
  const cuda_stream stream;
  check(cudaSetDevice(0));
  {
    graph_executor executor(tensor.plan(), stream.get());
    EXPECT_EQ(current(), 0);
    executor.launch(stream.get());
    executor.set_learning_rate(0, 0.2);
    executor.rebind(0, operand_kind::gradient, tensor.gradient.data());
    executor.launch(stream.get());
    EXPECT_EQ(executor.status().step, 2u);
    EXPECT_EQ(current(), 0);
    executor.release();
  }
  {
    stream_executor executor(tensor.plan(), stream.get());
    executor.launch(stream.get());
    EXPECT_EQ(executor.status().step, 1u);
  }
  EXPECT_EQ(current(), 0);
  check(cudaSetDevice(1));
  stream.synchronize();
  // 1 - 0.1 - 0.2 by the graph; then a first step of a new executor on the moments after three
  // gradients of one: 0.1 * (0.271 / 0.1) / sqrt(0.002997001 / 0.001).
  EXPECT_NEAR(tensor.first_parameter(), 0.7 - 0.1 * 2.71 / std::sqrt(2.997001), 1e-5);
}

TEST_F(GpuDevices, A32_MemoryOfAnotherDeviceIsRefusedByName) {
  check(cudaSetDevice(1));
  const ones_on_device elsewhere;
  check(cudaSetDevice(0));
  const ones_on_device here;
  const cuda_stream stream;
  graph_executor executor(here.plan(), stream.get());
  expect_error<usage_error>(
      [&] { executor.rebind(0, operand_kind::exp_avg, elsewhere.exp_avg.data()); },
      {"weight", "exp_avg", "cuda:1", "cuda:0"});
  executor.launch(stream.get());
  stream.synchronize();
  expect_updates(here, 1);
}

}  // namespace
}  // namespace stepgraph::test
