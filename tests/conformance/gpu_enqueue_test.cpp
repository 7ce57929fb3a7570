#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "common/expect_error.hpp"
#include "common/instantiate.hpp"
#include "common/ones_on_device.hpp"
#include "common/same_bits.hpp"
#include "common/stream_gate.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/error.hpp"

// One graph_executor whose steps are launched, enqueued as kernels and captured by the caller, in
// any order and on any stream; and deliveries beside a capture, of both CUDA executors.
namespace stepgraph::test {
namespace {

/// As kernels, on a stream that may be captured.
void enqueue_step(graph_executor& executor, cudaStream_t stream) { executor.enqueue(stream); }
void enqueue_step(stream_executor& executor, cudaStream_t stream) { executor.launch(stream); }

/// What the executor enqueues, as a graph of the caller's.
template <class Executor>
cuda::unique_graph_exec capture_step(Executor& executor, cudaStream_t stream) {
  cuda::capture_scope capture(stream);
  enqueue_step(executor, stream);
  return instantiate(capture.finish());
}

constexpr graph_options recorded = {.record_launches = true};

class GpuEnqueue : public gpu_test {};

TEST_F(GpuEnqueue, EveryWayToRunAStepGivesTheSameBits) {
  const group_options group = {.learning_rate = 0.1, .weight_decay = 0.01};
  const step_options options = {.max_grad_norm = 1.0, .count_zeros = true};
  const ones_on_device mixed(5000);
  const ones_on_device launched(5000);
  const cuda_stream stream;
  graph_executor executor(mixed.plan(group, options), stream.get());
  graph_executor reference(launched.plan(group, options), stream.get());
  const cuda::unique_graph_exec captured = capture_step(executor, stream.get());
  for (int round = 0; round < 3; ++round) {
    executor.enqueue(stream.get());
    executor.launch(stream.get());
    check(cudaGraphLaunch(captured.get(), stream.get()));
    for (int step = 0; step < 3; ++step) reference.launch(stream.get());
  }
  const step_status ours = executor.status();
  const step_status theirs = reference.status();
  EXPECT_EQ(ours.step, 9u);
  EXPECT_EQ(ours.grad_norm, theirs.grad_norm);
  EXPECT_EQ(ours.groups[0].step, theirs.groups[0].step);
  EXPECT_TRUE(same_bits(mixed.parameter.read(), launched.parameter.read()));
  EXPECT_TRUE(same_bits(mixed.exp_avg.read(), launched.exp_avg.read()));
  EXPECT_TRUE(same_bits(mixed.exp_avg_sq.read(), launched.exp_avg_sq.read()));
}

TEST_F(GpuEnqueue, ValuesBroughtByKernelsAreNotOverwrittenByTheNextReplay) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  executor.set_learning_rate(0, 0.3);
  executor.launch(stream.get());
  executor.set_learning_rate(0, 0.1);
  executor.enqueue(stream.get());
  executor.launch(stream.get());  // its executable still held 0.3
  expect_updates(tensor, 5);
  executor.set_learning_rate(0, 0.2);
  executor.deliver_async(stream.get());
  executor.launch(stream.get());
  expect_updates(tensor, 7);
}

TEST_F(GpuEnqueue, CaptureRunsNothingAndLeavesSettingsPending) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  executor.set_learning_rate(0, 0.2);
  const cuda::unique_graph_exec captured = capture_step(executor, stream.get());
  EXPECT_EQ(executor.status().step, 0u);
  check(cudaGraphLaunch(captured.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 1);
  executor.deliver_async(stream.get());
  check(cudaGraphLaunch(captured.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 3);
}

TEST_F(GpuEnqueue, UpdateThatRebuildsInvalidatesWhatWasCaptured) {
  const ones_on_device tensor;
  const ones_on_device other;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  // Nothing was captured: nothing to invalidate.
  step_builder builder;
  const group_id group = builder.add_group({.learning_rate = 0.1});
  builder.add_tensor(group, tensor.operands("weight"));
  builder.add_tensor(group, other.operands("other"));
  EXPECT_TRUE(executor.update(builder.build(), update_path::instantiate, stream.get()).rebuilt);
  EXPECT_EQ(executor.recapture_required(), std::nullopt);

  { const cuda::unique_graph_exec captured = capture_step(executor, stream.get()); }
  EXPECT_EQ(executor.recapture_required(), std::nullopt);
  EXPECT_TRUE(executor.update(tensor.plan(), update_path::instantiate, stream.get()).rebuilt);
  ASSERT_TRUE(executor.recapture_required().has_value());
  EXPECT_NE(executor.recapture_required()->find("captured"), std::string::npos);
  executor.enqueue(stream.get());  // no capture
  EXPECT_TRUE(executor.recapture_required().has_value());
  const cuda::unique_graph_exec captured = capture_step(executor, stream.get());
  EXPECT_EQ(executor.recapture_required(), std::nullopt);
  check(cudaGraphLaunch(captured.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 2);
}

TEST_F(GpuEnqueue, UpdateOfValuesLeavesWhatWasCapturedGood) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  const cuda::unique_graph_exec captured = capture_step(executor, stream.get());
  const update_report report =
      executor.update(tensor.plan({.learning_rate = 0.2}), update_path::instantiate, stream.get());
  EXPECT_FALSE(report.rebuilt);
  EXPECT_EQ(executor.recapture_required(), std::nullopt);
  executor.deliver_async(stream.get());
  check(cudaGraphLaunch(captured.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 2);
}

TEST_F(GpuEnqueue, StepsOnDifferentStreamsRunOneAfterTheOther) {
  for (const bool record_launches : {false, true}) {
    SCOPED_TRACE(record_launches);
    // Large enough that an overlap of two steps would show.
    const ones_on_device tensor(1 << 20);
    const cuda_stream streams[3];
    graph_executor executor(tensor.plan({.learning_rate = 0.01}), streams[0].get(), {},
                            {.record_launches = record_launches});
    for (int step = 0; step < 60; ++step) {
      executor.set_learning_rate(0, step % 2 == 0 ? 0.01 : 0.005);
      const cudaStream_t stream = streams[step % 3].get();
      if (step % 5 < 2) {
        executor.launch(stream);
      } else {
        executor.enqueue(stream);
      }
    }
    EXPECT_EQ(executor.status().step, 60u);
    for (const float value : tensor.parameter.read()) ASSERT_NEAR(value, 0.55, 1e-4);
  }
}

TEST_F(GpuEnqueue, StreamExecutorOrdersItsStreamsToo) {
  const ones_on_device tensor(1 << 20);
  const ones_on_device other(1 << 20);
  const cuda_stream first;
  const cuda_stream second;
  stream_executor executor(tensor.plan({.learning_rate = 0.01}), first.get());
  for (int step = 0; step < 40; ++step) {
    const ones_on_device& target = step < 20 ? tensor : other;
    executor.rebind(0, operand_kind::parameter, target.parameter.data());
    executor.launch(step % 2 == 0 ? first.get() : second.get());
  }
  EXPECT_EQ(executor.status().step, 40u);
  for (const ones_on_device* updated : {&tensor, &other}) {
    for (const float value : updated->parameter.read()) ASSERT_NEAR(value, 0.8, 1e-4);
  }
}

// Tools that serialise launches, such as compute-sanitizer, block by themselves: a suite apart.
class GpuUnblockedStreams : public gpu_test {};

TEST_F(GpuUnblockedStreams, RecordedLaunchesNeedNoWaitWhenTheStreamChanges) {
  const ones_on_device tensor;
  const ones_on_device other;
  const cuda_stream first;
  const cuda_stream second;
  graph_executor executor(tensor.plan(), first.get(), {}, recorded);
  executor.enqueue(first.get());
  first.synchronize();
  stream_gate gate(first.get());
  executor.launch(first.get());
  executor.rebind(0, operand_kind::parameter, other.parameter.data());
  executor.launch(second.get());
  executor.enqueue(first.get());
  executor.set_learning_rate(0, 0.2);
  executor.deliver_async(second.get());
  EXPECT_FALSE(gate.passed()) << "a call waited for the device";
  gate.open();
  executor.launch(first.get());
  EXPECT_EQ(executor.status().step, 5u);
  expect_updates(tensor, 2);
  expect_updates(other, 4);
}

TEST_F(GpuEnqueue, ForeignWorkIsCalledInItsPlace) {
  const ones_on_device tensor;
  const cuda_stream stream;
  step_builder builder;
  builder.add_tensor(builder.add_group({.learning_rate = 0.1}), tensor.operands("weight"));
  builder.add_foreign_work({.name = "hook", .node = "advance_step"});
  std::vector<cudaStream_t> seen;
  graph_executor executor(builder.build(), stream.get(),
                          {{"hook", [&](cudaStream_t on) { seen.push_back(on); }}});
  ASSERT_EQ(seen.size(), 1u);  // its own capture
  executor.enqueue(stream.get());
  executor.launch(stream.get());
  executor.enqueue(stream.get());
  ASSERT_EQ(seen.size(), 3u);
  EXPECT_EQ(seen[1], stream.get());
  EXPECT_EQ(seen[2], stream.get());
  expect_updates(tensor, 3);
}

// What was delivered long ago is not delivered again because a later step fails.
TEST_F(GpuEnqueue, StepThatFailsGivesBackOnlyWhatItTook) {
  const cuda_stream stream;
  const ones_on_device expected;
  graph_executor undisturbed(expected.plan(), stream.get());
  undisturbed.set_group_step(0, 10);
  undisturbed.enqueue(stream.get());
  undisturbed.enqueue(stream.get());
  undisturbed.set_learning_rate(0, 0.2);
  undisturbed.enqueue(stream.get());

  const ones_on_device tensor;
  step_builder builder;
  builder.add_tensor(builder.add_group({.learning_rate = 0.1}), tensor.operands("weight"));
  builder.add_foreign_work({"hook", foreign_order::before, "advance_step"});
  bool fails = false;
  const auto hook = [&](cudaStream_t) {
    if (fails) throw std::runtime_error("hook");
  };
  graph_executor executor(builder.build(), stream.get(), {{"hook", hook}});
  executor.set_group_step(0, 10);
  executor.enqueue(stream.get());
  executor.enqueue(stream.get());
  fails = true;
  EXPECT_THROW(executor.enqueue(stream.get()), std::runtime_error);
  executor.set_learning_rate(0, 0.2);
  EXPECT_THROW(executor.enqueue(stream.get()), std::runtime_error);
  fails = false;
  executor.enqueue(stream.get());
  EXPECT_EQ(executor.status().groups[0].step, 13u);
  EXPECT_EQ(tensor.first_parameter(), expected.first_parameter());
}

TEST_F(GpuEnqueue, LoopsAndConditionalWorkAreRefused) {
  if (!conditional_nodes_supported()) GTEST_SKIP() << "the driver has no conditional nodes";
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor loop(tensor.plan(), stream.get(), {}, {.steps_per_launch = 3});
  expect_error<usage_error>([&] { loop.enqueue(stream.get()); }, {"steps_per_launch", "3"});
  loop.launch(stream.get());
  EXPECT_EQ(loop.status().step, 3u);

  step_builder builder;
  builder.add_tensor(builder.add_group({.learning_rate = 0.1}), tensor.operands("weight"));
  builder.add_foreign_work({.name = "rare", .node = "advance_step", .only_if_applied = true});
  graph_executor branch(builder.build(), stream.get(), {{"rare", [](cudaStream_t) {}}});
  expect_error<usage_error>([&] { branch.enqueue(stream.get()); }, {"rare", "only_if_applied"});
  branch.launch(stream.get());
  EXPECT_EQ(branch.status().step, 1u);
}

TEST_F(GpuEnqueue, ReleasedExecutorRefuses) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  executor.release();
  expect_error<usage_error>([&] { executor.enqueue(stream.get()); }, {"released"});
  expect_error<usage_error>([&] { executor.deliver_async(stream.get()); }, {"released"});
  expect_error<usage_error>([&] { executor.deliver_beside_capture(); }, {"released"});
}

TEST_F(GpuEnqueue, DeliveryOnACapturingStreamIsRefusedAndTheCaptureSurvives) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  executor.set_learning_rate(0, 0.2);
  std::optional<cuda::capture_scope> capture(std::in_place, stream.get());
  expect_error<capture_error>([&] { executor.deliver_async(stream.get()); }, {"captur"});
  executor.enqueue(stream.get());
  const cuda::unique_graph_exec replayed = instantiate(capture->finish());
  executor.deliver_async(stream.get());
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 2);
}

template <class Executor>
void deliver_beside_a_capture(Executor& executor, const ones_on_device& tensor,
                              const ones_on_device& other, cudaStream_t stream) {
  enqueue_step(executor, stream);
  executor.launch(stream);
  // On the stream that the steps ran on, which nothing has waited for.
  cuda::capture_scope capture(stream);
  executor.rebind(0, operand_kind::parameter, other.parameter.data());
  executor.set_learning_rate(0, 0.2);
  executor.deliver_beside_capture();
  enqueue_step(executor, stream);
  executor.deliver_beside_capture();  // nothing is pending
  const cuda::unique_graph_exec captured = instantiate(capture.finish());
  for (int replay = 0; replay < 2; ++replay) check(cudaGraphLaunch(captured.get(), stream));
  check(cudaStreamSynchronize(stream));
  EXPECT_NEAR(tensor.parameter.read().back(), 0.8, 1e-5);
  EXPECT_NEAR(other.parameter.read().back(), 0.6, 1e-5);
  EXPECT_EQ(executor.status().step, 4u);
}

TEST_F(GpuEnqueue, ChangesAreDeliveredBesideACapture) {
  // Long enough that the delivery would overtake the steps before it.
  const ones_on_device tensors[4] = {ones_on_device(1 << 24), ones_on_device(1 << 24),
                                     ones_on_device(1 << 24), ones_on_device(1 << 24)};
  const cuda_stream stream;
  {
    graph_executor executor(tensors[0].plan(), stream.get(), {}, recorded);
    deliver_beside_a_capture(executor, tensors[0], tensors[1], stream.get());
  }
  stream_executor executor(tensors[2].plan(), stream.get());
  deliver_beside_a_capture(executor, tensors[2], tensors[3], stream.get());
}

TEST_F(GpuEnqueue, DeliveryBesideACaptureNeedsRecordedLaunches) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  executor.launch(stream.get());
  std::optional<cuda::capture_scope> capture(std::in_place, stream.get());
  executor.set_learning_rate(0, 0.2);
  expect_error<capture_error>([&] { executor.deliver_beside_capture(); }, {"record_launches"});
  executor.enqueue(stream.get());
  const cuda::unique_graph_exec captured = instantiate(capture->finish());
  executor.deliver_async(stream.get());  // still pending
  check(cudaGraphLaunch(captured.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 3);
}

}  // namespace
}  // namespace stepgraph::test
