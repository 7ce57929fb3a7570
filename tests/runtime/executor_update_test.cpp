#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>

#include "common/expect_error.hpp"
#include "runtime/host_tensor.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/host_executor.hpp"

namespace stepgraph::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

// Bits after updates are for the conformance suite; this is about what an update carries over.
class HostUpdate : public ::testing::Test {
 protected:
  struct options_of {
    std::vector<group_options> groups;
    step_options step;
  };
  static options_of two_groups() {
    return {{{.name = "a", .learning_rate = 0.1}, {.name = "b", .learning_rate = 0.2}},
            {.skip_non_finite = true, .samples_per_step = 4, .record_capacity = 8}};
  }
  /// Tensor "x" in the first group, "y" in the last.
  step_plan plan(const options_of& options) {
    step_builder builder;
    builder.set_options(options.step);
    for (const group_options& group : options.groups) builder.add_group(group);
    builder.add_tensor(0, x.operands("x"));
    builder.add_tensor(static_cast<group_id>(options.groups.size() - 1), y.operands("y"));
    return builder.build();
  }

  host_tensor x;
  host_tensor y;
  host_executor executor{plan(two_groups())};
};

TEST_F(HostUpdate, SamePlanChangesNothing) {
  executor.launch();
  const update_report report = executor.update(plan(two_groups()));
  EXPECT_EQ(report.path, update_path::nothing);
  EXPECT_TRUE(report.reasons.empty());
  EXPECT_FALSE(report.rebuilt);
  executor.launch();
  EXPECT_EQ(executor.status().step, 2u);
}

TEST_F(HostUpdate, CountersGoOnAndGroupsGoByName) {
  executor.launch();
  executor.set_group_step(1, 40);
  executor.launch();
  options_of next = two_groups();
  next.groups = {
      {.name = "b", .learning_rate = 0.2}, {.name = "c"}, {.name = "a", .learning_rate = 0.1}};
  const update_report report = executor.update(plan(next));
  EXPECT_EQ(report.path, update_path::table_write);
  EXPECT_THAT(report.reasons, Contains(HasSubstr("group 'c'")));
  const step_status status = executor.status();
  EXPECT_EQ(status.step, 2u);
  EXPECT_EQ(status.samples, 8u);
  ASSERT_EQ(status.groups.size(), 3u);
  EXPECT_EQ(status.groups[0].step, 41u);
  EXPECT_EQ(status.groups[1].step, 0u);
  EXPECT_EQ(status.groups[2].step, 2u);
}

TEST_F(HostUpdate, ValuesSetByHandStayUnlessThePlanDecides) {
  executor.set_learning_rate(0, 0.5);
  executor.set_learning_rate(1, 0.6);
  executor.launch();
  executor.set_eps(0, 0.25);  // pending when the update comes
  executor.set_weight_decay(1, 0.125);
  options_of next = two_groups();
  next.groups[1].learning_rate = 0.7;
  next.groups.insert(next.groups.begin(), {.name = "front", .learning_rate = 0.3});
  executor.update(plan(next));
  executor.launch();
  const step_status status = executor.status();
  EXPECT_EQ(status.groups[0].learning_rate, 0.3);
  EXPECT_EQ(status.groups[1].learning_rate, 0.5);
  EXPECT_EQ(status.groups[2].learning_rate, 0.7);
  EXPECT_EQ(status.groups[2].weight_decay, 0.125);
}

TEST_F(HostUpdate, PendingValueOfADecidedFieldGivesWay) {
  executor.set_learning_rate(0, 0.5);
  options_of next = two_groups();
  next.groups[0].learning_rate = 0.3;
  executor.update(plan(next));
  executor.launch();
  EXPECT_EQ(executor.status().groups[0].learning_rate, 0.3);
}

TEST_F(HostUpdate, NewScheduleHoldsOverAValueSetByHand) {
  executor.set_learning_rate(0, 0.5);
  executor.launch();
  options_of next = two_groups();
  next.groups[0].learning_rate_schedule = schedules::table({1.0, 0.9, 0.8});
  executor.update(plan(next));
  executor.launch();
  EXPECT_DOUBLE_EQ(executor.status().groups[0].learning_rate, 0.9);
}

TEST_F(HostUpdate, LossScaleStateGoesOn) {
  options_of options = two_groups();
  options.step.loss_scale = 16.0;
  options.step.scaling.rule = loss_scale_rule::torch_amp;
  executor.update(plan(options));
  x.gradient[0] = std::numeric_limits<float>::infinity();
  executor.launch();
  EXPECT_EQ(executor.status().next_loss_scale.scale, 8.0f);
  EXPECT_EQ(executor.status().skipped, 1u);
  options.groups.push_back({.name = "c"});
  executor.update(plan(options));
  EXPECT_EQ(executor.status().next_loss_scale.scale, 8.0f);
  options.step.loss_scale = 32.0;
  executor.update(plan(options));
  EXPECT_EQ(executor.status().next_loss_scale.scale, 32.0f);
  EXPECT_EQ(executor.status().skipped, 1u);
}

TEST_F(HostUpdate, RecordsOfBeforeAreStillRead) {
  executor.launch();
  executor.launch();
  options_of next = two_groups();
  next.groups.push_back({.name = "c"});
  executor.update(plan(next));
  executor.launch();
  const record_batch batch = executor.read_records();
  ASSERT_EQ(batch.records.size(), 3u);
  EXPECT_EQ(batch.records[1].groups.size(), 2u);
  EXPECT_EQ(batch.records[2].groups.size(), 3u);
  EXPECT_EQ(batch.records[2].launch, 3u);
  EXPECT_EQ(batch.overwritten, 0u);
}

TEST_F(HostUpdate, RecordsThatNobodyReadsAreBounded) {
  options_of next = two_groups();
  for (int round = 0; round < 20; ++round) {
    executor.launch();
    next.groups.resize(2);
    if (round % 2 == 0) next.groups.push_back({.name = "c"});
    executor.update(plan(next));
  }
  const record_batch batch = executor.read_records();
  EXPECT_LE(batch.records.size(), 8u);
  EXPECT_EQ(batch.overwritten + batch.records.size(), 20u);
  EXPECT_EQ(batch.records.back().launch, 20u);
}

TEST_F(HostUpdate, LossScaleKeepsItsAddress) {
  const float* const address = executor.loss_scale_address();
  options_of next = two_groups();
  next.groups.push_back({.name = "c"});
  EXPECT_FALSE(executor.update(plan(next)).rebuilt);
  EXPECT_EQ(executor.loss_scale_address(), address);
}

TEST_F(HostUpdate, RefusedPlanLeavesEverythingAsItWas) {
  executor.launch();
  executor.set_learning_rate(0, 0.05);
  step_builder shapes(plan_purpose::inspect);
  shapes.add_group({});
  expect_error<usage_error>([&] { executor.update(shapes.build()); }, {"inspect", "memory"});
  step_builder elsewhere;
  elsewhere.add_group({});
  tensor_operands operands = x.operands("x");
  for (tensor_view* view :
       {&operands.parameter, &*operands.gradient, &operands.exp_avg, &operands.exp_avg_sq}) {
    view->device = {device_kind::cuda, 0};
  }
  elsewhere.add_tensor(0, operands);
  expect_error<usage_error>([&] { executor.update(elsewhere.build()); }, {"cuda:0", "host"});
  EXPECT_EQ(executor.plan().groups.size(), 2u);
  EXPECT_EQ(executor.recapture_required(), std::nullopt);
  executor.launch();
  EXPECT_EQ(executor.status().step, 2u);
  EXPECT_EQ(executor.status().groups[0].learning_rate, 0.05);
}

TEST_F(HostUpdate, ForeignWorkGoesOnOrIsGivenAnew) {
  const auto with_hook = [&](bool grown) {
    step_builder builder;
    builder.add_group({.name = "a"});
    builder.add_tensor(0, x.operands("x"));
    if (grown) builder.add_tensor(0, y.operands("y"));
    builder.add_foreign_work({.name = "hook", .node = "advance_step"});
    return builder.build();
  };
  int first = 0;
  int second = 0;
  host_executor run(with_hook(false), {{"hook", [&] { ++first; }}});
  run.launch();
  run.update(with_hook(true));
  run.launch();
  EXPECT_EQ(first, 2);
  run.update(with_hook(true), host_foreign_work{{"hook", [&] { ++second; }}});
  run.launch();
  EXPECT_EQ(first, 2);
  EXPECT_EQ(second, 1);
  // A plan without a place for it takes other callbacks too.
  expect_error<usage_error>([&] { run.update(plan(two_groups())); }, {"hook"});
  run.update(plan(two_groups()), host_foreign_work{});
  run.launch();
  EXPECT_EQ(second, 1);
  EXPECT_EQ(run.status().step, 4u);
}

TEST_F(HostUpdate, SettersOfAnotherThreadNeverMeetHalfAnUpdate) {
  std::atomic<bool> stop = false;
  std::thread setter([&] {
    for (int round = 0; !stop; ++round) {
      executor.set_learning_rate(0, 0.001 * (round % 7));
      executor.set_betas(1, 0.5, 0.75);
      executor.rebind(0, operand_kind::gradient, x.gradient.data());
      executor.ledger().moved(0, operand_kind::gradient, x.gradient.data());
      static_cast<void>(executor.recapture_required());
      static_cast<void>(executor.read_records());
      try {
        executor.set_weight_decay(2, 0.001 * (round % 5));
      } catch (const usage_error&) {
        // Two groups at the time.
      }
    }
  });
  options_of next = two_groups();
  for (int round = 0; round < 100; ++round) {
    next.groups.resize(2);
    if (round % 2 == 0) next.groups.push_back({.name = "c"});
    next.step.samples_per_step = static_cast<std::uint64_t>(round);
    executor.update(plan(next));
    executor.launch();
  }
  stop = true;
  setter.join();
  EXPECT_EQ(executor.status().step, 100u);
  executor.set_learning_rate(0, 0.25);
  executor.launch();
  EXPECT_EQ(executor.status().groups[0].learning_rate, 0.25);
}

}  // namespace
}  // namespace stepgraph::test
