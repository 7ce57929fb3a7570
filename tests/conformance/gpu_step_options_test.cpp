#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <set>
#include <vector>

#include "common/ones_on_device.hpp"
#include "common/stream_gate.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"

// What the options of a step look like from CUDA: nodes, addresses, page-locked inputs, records.
namespace stepgraph::test {
namespace {

class GpuStepOptions : public gpu_test {};

step_options everything() {
  step_options options;
  options.max_grad_norm = 1.0;
  options.count_zeros = true;
  options.scaling.rule = loss_scale_rule::torch_amp;
  options.unscale_gradients = true;
  options.exchange_totals = true;
  options.record_capacity = 8;
  return options;
}

/// Several norm groups, long enough that blocks of grad_stats add several chunks; a gradient alone.
struct grouped_tensors {
  std::vector<ones_on_device> tensors;
  ones_on_device alone{5000};

  grouped_tensors() {
    for (const std::uint64_t chunks : {1u, 4200u, 5u}) tensors.emplace_back(chunks * 2048 + 1);
  }
  step_plan plan(const step_options& options) const {
    step_builder builder;
    builder.set_options(options);
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const std::string name = std::to_string(t);
      builder.add_tensor(builder.add_group({.name = name, .norm_group = name}),
                         tensors[t].operands(name));
    }
    builder.add_gradient(0, "alone", *alone.operands("alone").gradient);
    return builder.build();
  }
};

TEST_F(GpuStepOptions, NodesAreThoseOfThePlanWhateverTheOptions) {
  const grouped_tensors tensors;
  const cuda_stream stream;
  step_options together = everything();
  together.exchange_totals = false;
  for (const step_options& options :
       {step_options{}, step_options{.measure_norm = true},
        step_options{.unscale_gradients = true, .record_capacity = 1}, together, everything()}) {
    const step_plan plan = tensors.plan(options);
    graph_executor executor(plan, stream.get());
    const std::vector<graph_node_info> nodes = executor.nodes();
    ASSERT_EQ(nodes.size(), plan.nodes.size());
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      EXPECT_EQ(nodes[i].name, plan.nodes[i].name);
      EXPECT_EQ(nodes[i].blocks, plan.nodes[i].blocks) << nodes[i].name;
      EXPECT_EQ(nodes[i].threads, plan.nodes[i].threads) << nodes[i].name;
    }
    executor.launch(stream.get());
    EXPECT_EQ(executor.status().step, 1u);
  }
}

TEST_F(GpuStepOptions, A24_CapturedStepHoldsKernelsAlone) {
  const grouped_tensors tensors;
  const cuda_stream stream;
  stream_executor executor(tensors.plan(everything()), stream.get());
  cuda::capture_scope capture(stream.get());
  executor.launch(stream.get());
  const cuda::unique_graph graph = capture.finish();
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph.get(), nullptr, &count));
  EXPECT_EQ(count, executor.plan().nodes.size());
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph.get(), nodes.data(), &count));
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    check(cudaGraphNodeGetType(node, &type));
    EXPECT_EQ(type, cudaGraphNodeTypeKernel);
  }
}

TEST_F(GpuStepOptions, SettingsReachAnAdvanceOfItsOwnToo) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan({.learning_rate = 0.1}, {.exchange_totals = true}),
                          stream.get());
  double expected = 1.0;
  for (const double learning_rate : {0.1, 0.25, 0.05}) {
    executor.set_learning_rate(0, learning_rate);
    executor.launch(stream.get());
    expected -= learning_rate;
  }
  EXPECT_NEAR(tensor.first_parameter(), expected, 1e-5);
}

TEST_F(GpuStepOptions, LossScaleAddressHoldsTheScaleOfTheNextStep) {
  const ones_on_device tensor;
  const cuda_stream stream;
  step_options options;
  options.loss_scale = 8.0;
  options.scaling.rule = loss_scale_rule::torch_amp;
  options.scaling.growth_interval = 2;
  graph_executor executor(tensor.plan({}, options), stream.get());
  const float* const address = executor.loss_scale_address();
  const auto scale_there = [&] {
    float scale = 0.0f;
    check(cudaMemcpyAsync(&scale, address, sizeof(scale), cudaMemcpyDeviceToHost, stream.get()));
    stream.synchronize();
    return scale;
  };
  EXPECT_EQ(scale_there(), 8.0f);
  for (int step = 0; step < 6; ++step) {
    const auto before = static_cast<double>(scale_there());
    executor.launch(stream.get());
    EXPECT_EQ(executor.status().loss_scale, before);
    EXPECT_EQ(scale_there(), executor.status().next_loss_scale.scale);
    EXPECT_EQ(executor.loss_scale_address(), address);
  }
  EXPECT_EQ(scale_there(), 64.0f);
}

TEST_F(GpuStepOptions, TotalsAddressHoldsTheSumsOfTheNormGroupsAndTheZeros) {
  const grouped_tensors tensors;
  const cuda_stream stream;
  tensors.tensors[2].gradient.write(std::vector<float>(5 * 2048 + 1, 0.0f));
  stream_executor executor(tensors.plan(everything()), stream.get());
  executor.launch(stream.get());
  std::vector<double> totals(4);
  check(cudaMemcpyAsync(totals.data(), executor.totals_address(), totals.size() * sizeof(double),
                        cudaMemcpyDeviceToHost, stream.get()));
  stream.synchronize();
  // Gradients of ones; the gradient alone is in the first group.
  EXPECT_EQ(totals, (std::vector<double>{2049.0 + 5000.0, 4200.0 * 2048 + 1, 0.0, 5 * 2048 + 1}));
  EXPECT_EQ(executor.status().grad_norm, std::sqrt(2049.0 + 5000.0 + 4200.0 * 2048 + 1));
}

TEST_F(GpuStepOptions, PageLockedInputsAreReadAtEveryStep) {
  const ones_on_device tensor;
  const cuda_stream stream;
  const cuda::unique_pinned_memory memory = cuda::allocate_pinned(sizeof(float));
  auto* const learning_rate = static_cast<float*>(memory.get());
  graph_executor executor(tensor.plan({.learning_rate_input = learning_rate}), stream.get());
  double expected = 1.0;
  for (const float value : {0.25f, 0.125f, 0.0f}) {
    *learning_rate = value;
    executor.launch(stream.get());
    stream.synchronize();
    expected -= static_cast<double>(value);
    EXPECT_NEAR(tensor.first_parameter(), expected, 1e-5);
  }
}

TEST_F(GpuStepOptions, RecordsOutliveAReleaseOfTheExecutor) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan({}, {.record_capacity = 4}), stream.get());
  executor.launch(stream.get());
  executor.launch(stream.get());
  executor.release();
  const record_batch batch = executor.read_records();
  ASSERT_EQ(batch.records.size(), 2u);
  EXPECT_EQ(batch.records[1].step, 2u);
  EXPECT_TRUE(executor.read_records().records.empty());
}

TEST_F(GpuStepOptions, MovedExecutorKeepsItsRecords) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor first(tensor.plan({}, {.record_capacity = 4}), stream.get());
  first.launch(stream.get());
  graph_executor second(std::move(first));
  second.launch(stream.get());
  stream.synchronize();
  EXPECT_EQ(second.read_records().records.size(), 2u);
}

// Tools that serialise launches, such as compute-sanitizer, block by themselves: a suite apart.
class GpuUnblockedRecords : public gpu_test {};

TEST_F(GpuUnblockedRecords, ReadingThemDoesNotWaitForARunningStep) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan({}, {.record_capacity = 4}), stream.get());
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_EQ(executor.read_records().records.size(), 1u);
  stream_gate gate(stream.get());
  executor.launch(stream.get());
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(executor.read_records().records.empty());
  EXPECT_FALSE(gate.passed()) << "a call waited for the stream";
  gate.open();
  stream.synchronize();
  EXPECT_EQ(executor.read_records().records.size(), 1u);
}

TEST_F(GpuUnblockedRecords, LoadingAStateDoesNotWaitForARunningStep) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan({}, {.record_capacity = 8}), stream.get());
  executor.launch(stream.get());
  step_status state = executor.status();
  state.step = 100;
  state.groups[0].step = 200;
  executor.launch(stream.get());
  stream.synchronize();
  executor.read_records();
  stream_gate gate(stream.get());
  executor.launch(stream.get());
  executor.load_state(state);
  executor.launch(stream.get());
  EXPECT_FALSE(gate.passed()) << "a call waited for the stream";
  gate.open();
  stream.synchronize();
  const record_batch batch = executor.read_records();
  ASSERT_EQ(batch.records.size(), 2u);
  EXPECT_EQ(batch.records[0].step, 3u) << "made before the state was loaded";
  EXPECT_EQ(batch.records[1].step, 101u);
  EXPECT_EQ(batch.records[1].groups[0].step, 201u);
}

}  // namespace
}  // namespace stepgraph::test
