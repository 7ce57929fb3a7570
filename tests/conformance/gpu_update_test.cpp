#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <optional>
#include <thread>

#include "common/expect_error.hpp"
#include "common/instantiate.hpp"
#include "common/ones_on_device.hpp"
#include "runtime/host_tensor.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/error.hpp"

// What an update does to an instantiated graph: paths, ceilings, lifetimes.
namespace stepgraph::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using enum update_path;

constexpr update_path every_path[] = {nothing,         scalar_write, table_write,
                                      node_parameters, graph_update, instantiate};

/// A plan to bend. The tensors of group "masters" have masters, so a node of their own.
struct draft {
  std::vector<group_options> groups = {{.name = "plain", .learning_rate = 0.1},
                                       {.name = "masters", .learning_rate = 0.1}};
  struct tensor {
    const ones_on_device* memory;
    group_id group = 0;
    const ones_on_device* master = nullptr;
  };
  std::vector<tensor> tensors;
  step_options options;

  step_plan plan() const {
    step_builder builder;
    builder.set_options(options);
    for (const group_options& group : groups) builder.add_group(group);
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      tensor_operands operands = tensors[t].memory->operands("tensor " + std::to_string(t));
      if (tensors[t].master != nullptr) {
        operands.master = tensors[t].master->operands("").parameter;
      }
      builder.add_tensor(tensors[t].group, operands);
    }
    return builder.build();
  }
};

class GpuUpdate : public gpu_test {
 protected:
  void SetUp() override {
    gpu_test::SetUp();
    if (IsSkipped()) return;
    memory.emplace();
    before.tensors = {{&memory->first, 0}};
    executor.emplace(before.plan(), memory->stream.get());
  }
  void launch() {
    executor->launch(memory->stream.get());
    memory->stream.synchronize();
  }
  update_report update(const draft& next, update_path ceiling = instantiate) {
    update_report report = executor->update(next.plan(), ceiling, memory->stream.get());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    return report;
  }
  static void expect_updates(const ones_on_device& tensor, double tenths) {
    EXPECT_NEAR(tensor.first_parameter(), 1.0 - 0.1 * tenths, 1e-5);
  }

  /// A tensor with fresh moments that was updated once, as update number `step` of its group: the
  /// moments are then corrected by more than they have.
  static void expect_first_update_at(const ones_on_device& tensor, int step) {
    const double exp_avg = 0.1 / (1.0 - std::pow(0.9, step));
    const double exp_avg_sq = 0.001 / (1.0 - std::pow(0.999, step));
    EXPECT_NEAR(tensor.first_parameter(), 1.0 - 0.1 * exp_avg / std::sqrt(exp_avg_sq), 1e-5);
  }

  struct device_memory {
    cuda_stream stream;
    ones_on_device first{100};
    ones_on_device second{100};
    ones_on_device third{100};
  };
  std::optional<device_memory> memory;
  draft before;
  std::unique_ptr<device_memory> kept_;  ///< outlives the executor, as members go in reverse
  std::optional<graph_executor> executor;
};

TEST_F(GpuUpdate, SamePlanTakesNothing) {
  const update_report report = update(before, nothing);
  EXPECT_EQ(report.path, nothing);
  launch();
  expect_updates(memory->first, 1);
  EXPECT_EQ(executor->instantiations(), 1u);
}

TEST_F(GpuUpdate, A25_PointersAloneAreATableWrite) {
  launch();
  draft next = before;
  next.tensors[0].memory = &memory->second;
  const update_report report = update(next, table_write);
  EXPECT_EQ(report.path, table_write);
  EXPECT_EQ(report.counts.tables_written, 1u);
  EXPECT_EQ(report.counts.instantiations, 0u);
  EXPECT_EQ(report.counts.nodes_updated, 0u);
  EXPECT_FALSE(report.rebuilt);
  EXPECT_THAT(report.reasons, Contains(HasSubstr("tensor 'tensor 0': parameter moves")));
  launch();
  expect_updates(memory->first, 1);
  EXPECT_EQ(executor->status().step, 2u);
  EXPECT_LT(memory->second.first_parameter(), 1.0);
  EXPECT_EQ(executor->instantiations(), 1u);
}

TEST_F(GpuUpdate, HyperparametersAloneAreAScalarWrite) {
  draft next = before;
  next.groups[0].learning_rate = 0.2;
  update_report report = update(next, scalar_write);
  EXPECT_EQ(report.path, scalar_write);
  EXPECT_EQ(report.counts.scalars_written, 1u);
  launch();
  expect_updates(memory->first, 2);
  next.groups[0].mode = weight_decay_mode::l2;
  report = update(next, scalar_write);
  EXPECT_EQ(report.counts.tables_written, 1u);
  launch();
  // Both launches at the new rate.
  expect_updates(memory->first, 4);
}

TEST_F(GpuUpdate, A25_TensorsOfTheSameSignatureTakeNodeParameters) {
  launch();
  draft next = before;
  next.tensors.push_back({&memory->second, 1});
  update_report report = update(next, node_parameters);
  EXPECT_EQ(report.path, node_parameters);
  EXPECT_EQ(report.counts.nodes_updated, next.plan().nodes.size());
  EXPECT_EQ(report.counts.instantiations, 0u);
  EXPECT_TRUE(report.rebuilt);
  launch();
  expect_updates(memory->first, 2);
  expect_first_update_at(memory->second, 2);
  next.tensors.pop_back();
  report = update(next, node_parameters);
  EXPECT_EQ(report.path, node_parameters);
  launch();
  expect_updates(memory->first, 3);
  expect_first_update_at(memory->second, 2);
  // Settings still reach the executable after both.
  executor->set_learning_rate(0, 0.2);
  launch();
  expect_updates(memory->first, 5);
  EXPECT_EQ(executor->instantiations(), 1u);
  EXPECT_EQ(executor->status().step, 4u);
}

TEST_F(GpuUpdate, AnotherKernelInTheSamePlaceIsNotInstantiated) {
  launch();
  draft next = before;
  next.tensors[0].master = &memory->third;
  const update_report report = update(next, graph_update);
  EXPECT_LE(report.path, graph_update);
  EXPECT_EQ(executor->instantiations(), 1u);
  launch();
  EXPECT_EQ(executor->status().step, 2u);
  EXPECT_LT(memory->third.first_parameter(), 1.0);
  EXPECT_THAT(executor->nodes().back().name, HasSubstr("f32/f32/f32/f32/f32"));
}

TEST_F(GpuUpdate, SettingsFollowTheNodeThatAdvancesTheStep) {
  // grad_stats, update, update: the first advances.
  draft measured = before;
  measured.options.measure_norm = true;
  measured.tensors.push_back({&memory->second, 1, &memory->third});
  update(measured);
  const std::uint64_t instantiations = executor->instantiations();
  executor->set_learning_rate(0, 0.2);
  launch();
  expect_updates(memory->first, 2);
  // grad_stats, advance_step, update: as many nodes, and the second advances.
  draft exchanged = before;
  exchanged.options.exchange_totals = true;
  const update_report report = update(exchanged);
  EXPECT_EQ(executor->instantiations(), instantiations);
  EXPECT_LE(report.path, graph_update);
  executor->set_learning_rate(0, 0.3);
  launch();
  expect_updates(memory->first, 5);
  EXPECT_EQ(executor->status().groups[0].learning_rate, 0.3);
}

TEST_F(GpuUpdate, ForeignWorkIsCapturedAgainByTheWholeGraph) {
  const device_buffer<float> touched(std::vector<float>{1.0f});
  const auto with_hook = [&](bool grown) {
    step_builder builder;
    builder.add_group({.name = "plain", .learning_rate = 0.1});
    builder.add_tensor(0, memory->first.operands("first"));
    if (grown) builder.add_tensor(0, memory->second.operands("second"));
    builder.add_foreign_work({.name = "hook", .node = "advance_step"});
    return builder.build();
  };
  int captures = 0;
  const foreign_work hook = {{"hook", [&](const foreign_context& context) {
                                ++captures;
                                check(cudaMemsetAsync(touched.data(), 0, 4, context.stream));
                              }}};
  cudaStream_t const stream = memory->stream.get();
  graph_executor run(with_hook(false), stream, hook);
  run.launch(stream);
  expect_error<update_error>([&] { run.update(with_hook(true), node_parameters, stream); },
                             {"graph_update", "node_parameters"});
  EXPECT_GE(run.update(with_hook(true), instantiate, stream).path, graph_update);
  EXPECT_GE(captures, 2);
  touched.write(std::vector<float>{1.0f});
  run.launch(stream);
  memory->stream.synchronize();
  EXPECT_EQ(touched.read()[0], 0.0f);
  expect_updates(memory->first, 2);
  expect_first_update_at(memory->second, 2);
  run.set_learning_rate(0, 0.2);
  run.launch(stream);
  memory->stream.synchronize();
  expect_updates(memory->first, 4);

  int fresh = 0;
  const update_report report =
      run.update(with_hook(true), instantiate, stream,
                 foreign_work{{"hook", [&](const foreign_context&) { ++fresh; }}});
  EXPECT_GE(report.path, graph_update);
  EXPECT_EQ(fresh, 1);
  run.launch(stream);
  EXPECT_EQ(run.status().step, 4u);
}

TEST_F(GpuUpdate, A25_AnotherTopologyIsRefusedByTheDriverAndInstantiatedOnce) {
  launch();
  draft next = before;
  next.tensors.push_back({&memory->second, 1, &memory->third});
  update_report report = update(next);
  EXPECT_EQ(report.path, instantiate);
  EXPECT_EQ(report.counts.graph_updates_refused, 1u);
  EXPECT_EQ(report.counts.graph_updates, 0u);
  EXPECT_EQ(report.counts.instantiations, 1u);
  EXPECT_EQ(executor->instantiations(), 2u);
  EXPECT_THAT(report.reasons, Contains(HasSubstr("node 'update/f32/f32/f32/f32/f32' appears")));
  EXPECT_THAT(report.reasons, Contains(HasSubstr("the driver refused")));
  launch();
  expect_updates(memory->first, 2);
  expect_first_update_at(memory->third, 2);

  // And a group dropped, with its node.
  next.groups.pop_back();
  next.tensors.pop_back();
  report = update(next);
  EXPECT_EQ(report.path, instantiate);
  EXPECT_EQ(report.counts.graph_updates_refused, 1u);
  EXPECT_EQ(executor->instantiations(), 3u);
  EXPECT_THAT(report.reasons, Contains(HasSubstr("group 'masters' was dropped")));
  launch();
  expect_updates(memory->first, 3);
  expect_first_update_at(memory->third, 2);
  EXPECT_EQ(executor->status().step, 3u);
  executor->set_learning_rate(0, 0.2);
  launch();
  expect_updates(memory->first, 5);
}

TEST_F(GpuUpdate, CeilingIsObeyedAtEveryLevelAndChangesNothing) {
  const auto with = [&](auto&& change) {
    draft next = before;
    change(next);
    return next;
  };
  const struct {
    update_path needed;
    draft next;
    const char* word;
  } cases[] = {
      {scalar_write, with([](draft& next) { next.groups[0].eps = 0.5; }), "eps"},
      {table_write, with([&](draft& next) { next.tensors[0].memory = &memory->second; }),
       "exp_avg"},
      {node_parameters, with([&](draft& next) {
         next.tensors.push_back({&memory->second, 0});
       }),
       "tensor 1"},
      {node_parameters, with([](draft& next) { next.options.stochastic_rounding = true; }),
       "stochastic_rounding"},
      {instantiate, with([&](draft& next) {
         next.tensors.push_back({&memory->second, 1, &memory->third});
       }),
       "node 'update/f32/f32/f32/f32/f32'"},
  };
  double tenths = 0.0;
  executor->set_learning_rate(0, 0.01);
  for (const auto& tested : cases) {
    for (const update_path ceiling : every_path) {
      if (ceiling >= tested.needed) continue;
      SCOPED_TRACE(std::string(tested.word) + " under " + name_of(ceiling));
      const std::vector<graph_node_info> nodes = executor->nodes();
      const float* const address = executor->loss_scale_address();
      expect_error<update_error>([&] { update(tested.next, ceiling); },
                                 {name_of(tested.needed), name_of(ceiling), tested.word});
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
      ASSERT_TRUE(executor->recapture_required().has_value());
      EXPECT_THAT(*executor->recapture_required(), HasSubstr(tested.word));
      EXPECT_EQ(executor->plan().tensors.size(), 1u);
      EXPECT_EQ(executor->nodes().size(), nodes.size());
      EXPECT_EQ(executor->loss_scale_address(), address);
      EXPECT_EQ(executor->instantiations(), 1u);
      launch();
      expect_updates(memory->first, tenths += 0.1);
      expect_updates(memory->second, 0);
    }
  }
  update(before);
  EXPECT_EQ(executor->recapture_required(), std::nullopt);
}

TEST_F(GpuUpdate, InjectedFailuresChangeNothing) {
  launch();
  executor->set_learning_rate(0, 0.2);
  step_builder shapes(plan_purpose::inspect);
  shapes.add_group({});
  expect_error<usage_error>(
      [&] { executor->update(shapes.build(), instantiate, memory->stream.get()); }, {"inspect"});

  host_tensor on_host;
  step_builder host;
  host.add_group({});
  host.add_tensor(0, on_host.operands("weight"));
  expect_error<usage_error>(
      [&] { executor->update(host.build(), instantiate, memory->stream.get()); },
      {"host", "cuda:0"});

  // Host memory that claims to be the device's: found on the cheap path and on the dear one.
  tensor_operands operands = memory->first.operands("tensor 0");
  host_tensor same_size(100);
  operands.exp_avg.data = same_size.exp_avg.data();
  for (const char* extra : {"", "extra"}) {
    step_builder builder;
    for (const group_options& group : before.groups) builder.add_group(group);
    builder.add_tensor(0, operands);
    if (*extra != '\0') builder.add_tensor(0, memory->second.operands(extra));
    expect_error<usage_error>(
        [&] { executor->update(builder.build(), instantiate, memory->stream.get()); },
        {"tensor 0", "exp_avg", "host", "cuda:0"});
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(executor->recapture_required(), std::nullopt);
  launch();
  expect_updates(memory->first, 3);
  EXPECT_EQ(executor->instantiations(), 1u);
}

TEST_F(GpuUpdate, UpdateOnACapturingStreamIsRefusedAndTheCaptureSurvives) {
  const cuda_stream other;
  stream_executor captured(memory->second.plan(), other.get());
  std::optional<cuda::capture_scope> capture(std::in_place, other.get());
  draft next = before;
  next.tensors.push_back({&memory->third, 0});
  expect_error<capture_error>([&] { executor->update(next.plan(), instantiate, other.get()); },
                              {"captur"});
  expect_error<capture_error>([&] { captured.update(next.plan(), other.get()); }, {"captur"});
  captured.launch(other.get());
  EXPECT_TRUE(capture->finish());
  launch();
  expect_updates(memory->first, 1);
}

TEST_F(GpuUpdate, A26_UpdateAfterEverythingOfTheOldPlanIsGone) {
  for (int round = 0; round < 4; ++round) {
    // Each update is from a graph whose source, plan and tensors are gone, by another path.
    auto fresh = std::make_unique<device_memory>();
    draft next = before;
    next.tensors = {{&fresh->first, 0}};
    if (round % 2 == 0) next.tensors.push_back({&fresh->second, 1, &fresh->third});
    if (round == 3) next.tensors.push_back({&fresh->second, 0});
    update(next);
    memory->stream.synchronize();
    before.tensors = next.tensors;
    memory->stream.synchronize();
    std::unique_ptr<device_memory> gone = std::move(kept_);
    kept_ = std::move(fresh);
    gone.reset();
    executor->launch(kept_->stream.get());
    kept_->stream.synchronize();
    EXPECT_LT(kept_->first.first_parameter(), 1.0);
    EXPECT_EQ(executor->status().step, static_cast<std::uint64_t>(round + 1));
  }
  executor->set_learning_rate(0, 0.0);
  const double before_last = kept_->first.first_parameter();
  executor->launch(kept_->stream.get());
  kept_->stream.synchronize();
  EXPECT_EQ(kept_->first.first_parameter(), before_last);
  executor.reset();
}

TEST_F(GpuUpdate, UpdatesDoNotTouchLaunchesInFlight) {
  draft grown = before;
  grown.tensors.push_back({&memory->second, 0});
  for (int round = 0; round < 20; ++round) {
    for (int step = 0; step < 5; ++step) executor->launch(memory->stream.get());
    update(round % 2 == 0 ? grown : before);
  }
  memory->stream.synchronize();
  expect_updates(memory->first, 100);
  EXPECT_EQ(executor->status().step, 100u);
  EXPECT_EQ(executor->instantiations(), 1u);
}

TEST_F(GpuUpdate, LaunchesOnAnotherStreamSeeTheUpdate) {
  const cuda_stream other;
  draft next = before;
  next.tensors.push_back({&memory->second, 0});
  for (int step = 0; step < 20; ++step) executor->launch(memory->stream.get());
  executor->update(next.plan(), instantiate, memory->stream.get());
  executor->launch(other.get());
  other.synchronize();
  EXPECT_EQ(executor->status().step, 21u);
  expect_first_update_at(memory->second, 21);
}

TEST_F(GpuUpdate, SettersOfAnotherThreadNeverMeetHalfAnUpdate) {
  std::atomic<bool> stop = false;
  std::string failure;
  std::thread setter([&] {
    try {
      for (int round = 0; !stop; ++round) {
        executor->set_learning_rate(0, 0.001 * (round % 3));
        executor->rebind(0, operand_kind::gradient, memory->first.gradient.data());
        executor->ledger().moved(0, operand_kind::gradient, memory->first.gradient.data());
        static_cast<void>(executor->recapture_required());
        static_cast<void>(executor->read_records());
      }
    } catch (const std::exception& error) {
      failure = error.what();
    }
  });
  draft grown = before;
  grown.tensors.push_back({&memory->second, 1, &memory->third});
  for (int round = 0; round < 50; ++round) {
    update(round % 2 == 0 ? grown : before);
    for (int step = 0; step < 4; ++step) executor->launch(memory->stream.get());
  }
  stop = true;
  setter.join();
  EXPECT_EQ(failure, "");
  EXPECT_EQ(executor->status().step, 200u);
  executor->set_learning_rate(0, 0.25);
  launch();
  EXPECT_EQ(executor->status().groups[0].learning_rate, 0.25);
}

TEST_F(GpuUpdate, A22_ReleaseIsFinalAndSaysSo) {
  launch();
  executor->release();
  executor->release();
  const std::vector<std::string> words = {"released"};
  cudaStream_t const stream = memory->stream.get();
  expect_error<usage_error>([&] { executor->launch(stream); }, words);
  expect_error<usage_error>([&] { executor->update(before.plan(), instantiate, stream); }, words);
  expect_error<usage_error>([&] { executor->set_learning_rate(0, 0.1); }, words);
  expect_error<usage_error>(
      [&] { executor->rebind(0, operand_kind::gradient, memory->first.gradient.data()); }, words);
  expect_error<usage_error>([&] { static_cast<void>(executor->status()); }, words);
  expect_error<usage_error>([&] { static_cast<void>(executor->nodes()); }, words);
  expect_error<usage_error>([&] { static_cast<void>(executor->loss_scale_address()); }, words);
  ASSERT_TRUE(executor->recapture_required().has_value());
  EXPECT_THAT(*executor->recapture_required(), HasSubstr("released"));
  EXPECT_EQ(executor->instantiations(), 1u);
  EXPECT_EQ(executor->ledger().entries().size(), 4u);
  expect_updates(memory->first, 1);
}

TEST_F(GpuUpdate, A23_StaleOperandsAreRefusedByEveryCudaExecutor) {
  const cuda_stream stream;
  stream_executor eager(memory->second.plan(), stream.get());
  const auto expect_refused = [&](auto&& call) {
    expect_error<usage_error>(call, {"gradient", "freed", "rebind"});
  };
  executor->ledger().freed(0, operand_kind::gradient);
  eager.ledger().freed(0, operand_kind::gradient);
  expect_refused([&] { launch(); });
  expect_refused([&] { eager.launch(stream.get()); });
  expect_refused([&] { eager.deliver_async(stream.get()); });
  {
    std::optional<cuda::capture_scope> capture(std::in_place, stream.get());
    expect_refused([&] { eager.launch(stream.get()); });
  }
  executor->rebind(0, operand_kind::gradient, memory->third.gradient.data());
  eager.rebind(0, operand_kind::gradient, memory->third.gradient.data());
  launch();
  eager.launch(stream.get());
  stream.synchronize();
  expect_updates(memory->first, 1);
  expect_updates(memory->second, 1);
}

TEST_F(GpuUpdate, StreamExecutorSaysThatCapturedLaunchesAreInvalid) {
  const cuda_stream stream;
  const ones_on_device& tensor = memory->second;
  stream_executor run(tensor.plan(), stream.get());
  const auto capture = [&] {
    cuda::capture_scope scope(stream.get());
    run.launch(stream.get());
    return test::instantiate(scope.finish());
  };
  cuda::unique_graph_exec replayed = capture();
  // Values alone: the replay stays good.
  EXPECT_FALSE(run.update(tensor.plan({.learning_rate = 0.2}), stream.get()).rebuilt);
  EXPECT_EQ(run.recapture_required(), std::nullopt);
  run.deliver_async(stream.get());
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 2);

  step_builder builder;
  builder.add_group({.learning_rate = 0.2});
  builder.add_tensor(0, tensor.operands("weight"));
  builder.add_tensor(0, memory->third.operands("third"));
  EXPECT_TRUE(run.update(builder.build(), stream.get()).rebuilt);
  ASSERT_TRUE(run.recapture_required().has_value());
  EXPECT_THAT(*run.recapture_required(), HasSubstr("replayed"));
  replayed = capture();
  EXPECT_EQ(run.recapture_required(), std::nullopt);
  check(cudaGraphLaunch(replayed.get(), stream.get()));
  stream.synchronize();
  expect_updates(tensor, 4);
  EXPECT_EQ(run.status().step, 2u);
}

}  // namespace
}  // namespace stepgraph::test
