#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "common/expect_error.hpp"
#include "common/instantiate.hpp"
#include "conformance/foreign_kernels.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/error.hpp"

// Foreign work of the CUDA executors that goes well, and what they refuse before anything runs.
namespace stepgraph::test {
namespace {

using ::testing::ElementsAre;

enum class runner { stream, captured, graph };

std::string name_of(runner kind) {
  return kind == runner::stream ? "Stream" : kind == runner::captured ? "Captured" : "Graph";
}

/// A step on a stream, launched in one of three ways.
class foreign_run {
 public:
  foreign_run(runner kind, const step_plan& plan, const foreign_work& work) : kind_(kind) {
    if (kind == runner::graph) {
      graph_.emplace(plan, stream_.get(), work);
      return;
    }
    eager_.emplace(plan, stream_.get(), work);
    if (kind == runner::stream) return;
    cuda::capture_scope capture(stream_.get());
    eager_->launch(stream_.get());
    replayed_ = instantiate(capture.finish());
  }

  executor& get() { return graph_ ? static_cast<executor&>(*graph_) : *eager_; }
  double* totals() { return graph_ ? graph_->totals_address() : eager_->totals_address(); }
  void launch() {
    if (kind_ == runner::graph) {
      graph_->launch(stream_.get());
    } else if (kind_ == runner::stream) {
      eager_->launch(stream_.get());
    } else {
      eager_->deliver_async(stream_.get());
      check(cudaGraphLaunch(replayed_.get(), stream_.get()));
    }
  }
  void synchronize() const { stream_.synchronize(); }

 private:
  runner kind_;
  cuda_stream stream_;
  std::optional<graph_executor> graph_;
  std::optional<stream_executor> eager_;
  cuda::unique_graph_exec replayed_;
};

class GpuForeignWork : public gpu_test, public ::testing::WithParamInterface<runner> {};

INSTANTIATE_TEST_SUITE_P(Executors, GpuForeignWork,
                         ::testing::Values(runner::stream, runner::captured, runner::graph),
                         [](const auto& each) { return name_of(each.param); });

TEST_P(GpuForeignWork, RunsInItsPlaceAtEveryStep) {
  const ones_on_device tensor;
  const device_log log;
  foreign_run run(
      GetParam(),
      plan_with(tensor, {{"4", foreign_order::after, f32_update},
                         {"2", foreign_order::after, "grad_stats"},
                         {"3", foreign_order::after, "grad_stats"},
                         {"1", foreign_order::before, "grad_stats"}}),
      {{"1", log.entry(1)}, {"2", log.entry(2)}, {"3", log.entry(3)}, {"4", log.entry(4)}});
  run.launch();
  run.launch();
  EXPECT_THAT(log.read(), ElementsAre(1, 2, 3, 4, 1, 2, 3, 4));
  EXPECT_NEAR(tensor.first_parameter(), 0.8, 1e-5);
}

// Large and slow enough that a node that starts early reads what was there before.
TEST_P(GpuForeignWork, NodesOnBothSidesSeeItsWholeWork) {
  const ones_on_device tensor(1 << 20);
  const device_buffer<float> seen(std::vector<float>(1, 0.0f));
  foreign_run run(GetParam(),
                  plan_with(tensor, {{"renew", foreign_order::before, "grad_stats"},
                                     {"erase", foreign_order::after, "grad_stats"},
                                     {"look", foreign_order::after, f32_update}}),
                  {{"renew",
                    [&](cudaStream_t stream) {
                      fill_slowly_async(tensor.gradient.data(), tensor.numel, 2.0f, 200, stream);
                    }},
                   {"erase",
                    [&](cudaStream_t stream) {
                      fill_slowly_async(tensor.gradient.data(), tensor.numel, 0.0f, 200, stream);
                    }},
                   {"look", [&](cudaStream_t stream) {
                      check(cudaMemcpyAsync(seen.data(), tensor.exp_avg.data() + tensor.numel - 1,
                                            sizeof(float), cudaMemcpyDeviceToDevice, stream));
                    }}});
  for (int step = 0; step < 3; ++step) run.launch();
  EXPECT_EQ(run.get().status().grad_norm, 2.0 * std::sqrt(static_cast<double>(tensor.numel)));
  // The update saw zeros alone: a fresh moment stays zero and the parameter where it is.
  for (const float value : tensor.parameter.read()) ASSERT_EQ(value, 1.0f);
  EXPECT_EQ(seen.read()[0], 0.0f);
}

TEST_P(GpuForeignWork, ThatEnqueuesNothingIsLegal) {
  const ones_on_device tensor;
  foreign_run run(GetParam(),
                  plan_with(tensor, {{"first", foreign_order::before, "grad_stats"},
                                     {"between", foreign_order::after, "grad_stats"},
                                     {"last", foreign_order::after, f32_update}}),
                  {{"first", [](cudaStream_t) {}},
                   {"between", [](cudaStream_t) {}},
                   {"last", [](const foreign_context&) {}}});
  run.launch();
  run.launch();
  run.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.8, 1e-5);
}

TEST_P(GpuForeignWork, MayForkToOtherStreamsAndJoinThem) {
  const ones_on_device tensor(1 << 18);
  const cuda_stream left;
  const cuda_stream right;
  const cuda::unique_event forked = cuda::make_event();
  const cuda::unique_event left_done = cuda::make_event();
  const cuda::unique_event right_done = cuda::make_event();
  const std::uint64_t half = tensor.numel / 2;
  const auto work = [&](cudaStream_t stream) {
    check(cudaEventRecord(forked.get(), stream));
    check(cudaStreamWaitEvent(left.get(), forked.get(), 0));
    check(cudaStreamWaitEvent(right.get(), forked.get(), 0));
    fill_slowly_async(tensor.gradient.data(), half, 0.0f, 200, left.get());
    fill_slowly_async(tensor.gradient.data() + half, half, 0.0f, 200, right.get());
    check(cudaEventRecord(left_done.get(), left.get()));
    check(cudaEventRecord(right_done.get(), right.get()));
    check(cudaStreamWaitEvent(stream, left_done.get(), 0));
    check(cudaStreamWaitEvent(stream, right_done.get(), 0));
  };
  foreign_run run(GetParam(), plan_with(tensor, {{"erase", foreign_order::before, "grad_stats"}}),
                  {{"erase", work}});
  run.launch();
  EXPECT_EQ(run.get().status().grad_norm, 0.0);
  for (const float value : tensor.parameter.read()) ASSERT_EQ(value, 1.0f);
}

TEST_P(GpuForeignWork, CombinesTotalsBetweenStatisticsAndAdvance) {
  const ones_on_device tensor;
  const device_buffer<double> everyone(std::vector<double>{16.0});
  foreign_run run(GetParam(),
                  plan_with(tensor, {{"exchange", foreign_order::after, "grad_stats"}},
                            {.max_grad_norm = 1.0, .exchange_totals = true}),
                  {{"exchange", [&](const foreign_context& context) {
                      EXPECT_NE(context.totals, nullptr);
                      EXPECT_NE(context.loss_scale, nullptr);
                      check(cudaMemcpyAsync(context.totals, everyone.data(), sizeof(double),
                                            cudaMemcpyDeviceToDevice, context.stream));
                    }}});
  run.launch();
  EXPECT_EQ(run.get().status().grad_norm, 4.0);
  EXPECT_NEAR(run.get().status().clip_coefficient, 0.25, 1e-6);
}

TEST_P(GpuForeignWork, ValuesSetByHandFindTheNodeThatTakesThem) {
  for (const bool measured : {true, false}) {
    const ones_on_device tensor;
    const device_log log;
    const char* const first = measured ? "grad_stats" : "advance_step";
    foreign_run run(GetParam(),
                    plan_with(tensor,
                              {{"1", foreign_order::before, first},
                               {"2", foreign_order::before, first},
                               {"3", foreign_order::after, first}},
                              {.skip_non_finite = measured}),
                    {{"1", log.entry(1)}, {"2", log.entry(2)}, {"3", log.entry(3)}});
    run.launch();
    run.get().set_learning_rate(0, 0.2);
    run.launch();
    run.launch();
    run.synchronize();
    EXPECT_NEAR(tensor.first_parameter(), 0.5, 1e-5);
  }
}

TEST_P(GpuForeignWork, MissingEmptyAndSurplusCallbacksAreRefusedByName) {
  const ones_on_device tensor;
  const step_plan plan = plan_with(tensor, {{"reduce", foreign_order::after, "grad_stats"},
                                            {"mean", foreign_order::after, f32_update}});
  const auto nothing = [](cudaStream_t) {};
  const auto refuse = [&](const foreign_work& work, const std::vector<std::string>& words) {
    expect_error<usage_error>([&] { foreign_run run(GetParam(), plan, work); }, words);
  };
  refuse({}, {"'reduce'", "no callback"});
  refuse({{"mean", nothing}}, {"'reduce'", "no callback"});
  refuse({{"mean", nothing}, {"reduce", {}}}, {"'reduce'", "no callback"});
  refuse({{"mean", nothing}, {"reduce", nothing}, {"sum", nothing}}, {"'sum'", "no place"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(tensor.first_parameter(), 1.0);
}

class GpuForeignNodes : public gpu_test {};

TEST_F(GpuForeignNodes, ProgrammaticEdgesAreThoseBetweenKernelsOfTheStep) {
  const ones_on_device tensor;
  const cuda_stream stream;
  const graph_executor plain(plan_with(tensor, {}), stream.get());
  std::vector<graph_node_info> nodes = plain.nodes();
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_FALSE(nodes[0].programmatic);
  EXPECT_TRUE(nodes[1].programmatic);

  const device_log log;
  const graph_executor executor(plan_with(tensor, {{"two", foreign_order::after, "grad_stats"},
                                                   {"none", foreign_order::after, f32_update}}),
                                stream.get(),
                                {{"two",
                                  [&](cudaStream_t work) {
                                    log.append(1, work);
                                    log.append(2, work);
                                  }},
                                 {"none", [](cudaStream_t) {}}});
  nodes = executor.nodes();
  ASSERT_EQ(nodes.size(), 4u);
  EXPECT_EQ(nodes[1].name, "two");
  EXPECT_EQ(nodes[1].kind, node_kind::foreign);
  EXPECT_EQ(nodes[1].graph_nodes, 2u);
  EXPECT_EQ(nodes[1].function, "");
  EXPECT_EQ(nodes[1].blocks, 0u);
  EXPECT_EQ(nodes[1].threads, 0u);
  EXPECT_EQ(nodes[2].kind, node_kind::update);
  EXPECT_EQ(nodes[2].graph_nodes, 1u);
  EXPECT_EQ(nodes[3].graph_nodes, 0u);
  for (const graph_node_info& node : nodes) EXPECT_FALSE(node.programmatic) << node.name;
}

TEST_F(GpuForeignNodes, EveryKernelOfTheStepIsNamed) {
  const ones_on_device tensor;
  const cuda_stream stream;
  const graph_executor executor(
      plan_with(tensor, {{"exchange", foreign_order::after, "grad_stats"}},
                {.exchange_totals = true}),
      stream.get(), {{"exchange", [](cudaStream_t) {}}});
  const std::pair<const char*, const char*> expected[] = {{"grad_stats", "grad_totals_kernel"},
                                                          {"exchange", ""},
                                                          {"advance_step", "advance_step_kernel"},
                                                          {f32_update, "update_kernel"}};
  const std::vector<graph_node_info> nodes = executor.nodes();
  ASSERT_EQ(nodes.size(), std::size(expected));
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    EXPECT_EQ(nodes[i].name, expected[i].first);
    EXPECT_THAT(nodes[i].function, ::testing::HasSubstr(expected[i].second));
    EXPECT_EQ(nodes[i].programmatic, i > 2) << nodes[i].name;
    EXPECT_EQ(nodes[i].blocks, executor.plan().nodes[i].blocks);
    EXPECT_EQ(nodes[i].threads, executor.plan().nodes[i].threads);
  }
}

TEST_F(GpuForeignNodes, WorkIsCalledOncePerCaptureAndReplayedFromThenOn) {
  const ones_on_device tensor;
  const cuda_stream stream;
  const device_log log;
  int calls = 0;
  graph_executor executor(plan_with(tensor, {{"count", foreign_order::after, f32_update}}),
                          stream.get(), {{"count", [&](cudaStream_t work) {
                                            ++calls;
                                            EXPECT_TRUE(cuda::is_capturing(work));
                                            log.append(7, work);
                                          }}});
  EXPECT_EQ(calls, 1);
  for (int step = 0; step < 3; ++step) executor.launch(stream.get());
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(log.read(), ElementsAre(7, 7, 7));
}

}  // namespace
}  // namespace stepgraph::test
