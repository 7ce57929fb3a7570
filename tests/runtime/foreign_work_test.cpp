#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/expect_error.hpp"
#include "runtime/host_tensor.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/host_executor.hpp"

// Foreign work in plans and on the host; tests/conformance/gpu_foreign_work_test.cpp has the
// devices.
namespace stepgraph::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* update = "update/f32/f32/none/f32/f32";

/// A plan of one tensor with foreign work.
step_plan plan_with(host_tensor& tensor, const std::vector<foreign_node>& works,
                    const step_options& options = {.skip_non_finite = true}) {
  step_builder builder;
  builder.set_options(options);
  builder.add_tensor(builder.add_group({.learning_rate = 0.1}), tensor.operands("weight"));
  for (const foreign_node& work : works) builder.add_foreign_work(work);
  return builder.build();
}

std::vector<std::string> names_of(const step_plan& plan) {
  std::vector<std::string> names;
  for (const plan_node& node : plan.nodes) names.push_back(node.name);
  return names;
}

TEST(ForeignWork, StandsWhereItWasPut) {
  host_tensor tensor;
  const step_plan plan = plan_with(tensor, {{"d", foreign_order::after, update},
                                            {"b", foreign_order::after, "grad_stats"},
                                            {"a", foreign_order::before, "grad_stats"},
                                            {"c", foreign_order::before, update}});
  EXPECT_THAT(names_of(plan), ElementsAre("a", "grad_stats", "b", "c", update, "d"));
  EXPECT_EQ(plan.advance_node(), 1u);
}

TEST(ForeignWork, AtOnePointKeepsTheOrderInWhichItWasAdded) {
  host_tensor tensor;
  const step_plan plan = plan_with(tensor, {{"3", foreign_order::after, "grad_stats"},
                                            {"1", foreign_order::after, "grad_stats"},
                                            {"2", foreign_order::after, "grad_stats"}});
  EXPECT_THAT(names_of(plan), ElementsAre("grad_stats", "3", "1", "2", update));
}

TEST(ForeignWork, StandsBetweenTotalsAndAdvance) {
  host_tensor tensor;
  const step_plan plan = plan_with(tensor, {{"exchange", foreign_order::after, "grad_stats"}},
                                   {.skip_non_finite = true, .exchange_totals = true});
  EXPECT_THAT(names_of(plan), ElementsAre("grad_stats", "exchange", "advance_step", update));
  EXPECT_EQ(plan.advance_node(), 2u);
}

TEST(ForeignWork, IsPlainDataWithFullEdges) {
  host_tensor tensor;
  const step_plan plan = plan_with(
      tensor,
      {{"sum", foreign_order::before, "grad_stats"}, {"mean", foreign_order::after, update, true}},
      {.skip_non_finite = true});
  ASSERT_THAT(names_of(plan), ElementsAre("sum", "grad_stats", update, "mean"));
  for (const std::size_t i : {0, 3}) {
    const plan_node& node = plan.nodes[i];
    EXPECT_EQ(node.kind, node_kind::foreign);
    EXPECT_EQ(node.only_if_applied, i == 3);
    EXPECT_EQ(node.blocks, 0u);
    EXPECT_EQ(node.threads, 0u);
    EXPECT_THAT(node.tensors, IsEmpty());
  }
  ASSERT_EQ(plan.edges.size(), 3u);
  for (const plan_edge& edge : plan.edges) EXPECT_EQ(edge.programmatic, edge.from == 1u);
}

TEST(ForeignWork, ShowsInTheDotGraph) {
  host_tensor tensor;
  const std::string dot = to_dot(plan_with(tensor, {{"reduce", foreign_order::before, "grad_stats"},
                                                    {"mean", foreign_order::after, update, true}}));
  EXPECT_THAT(dot, HasSubstr("n0 [label=\"reduce\\nforeign work\", shape=ellipse]"));
  EXPECT_THAT(dot, HasSubstr("n3 [label=\"mean\\nforeign work\\nIF applied\", shape=diamond]"));
  EXPECT_THAT(dot, HasSubstr("n0 -> n1 [label=\"full\"]"));
  EXPECT_THAT(dot, HasSubstr("n1 -> n2 [label=\"programmatic\"]"));
}

TEST(ForeignWork, EmptyAndTakenNamesAreRefused) {
  step_builder builder;
  builder.add_foreign_work({.name = "reduce", .node = "grad_stats"});
  expect_error<usage_error>([&] { builder.add_foreign_work({.name = "", .node = "grad_stats"}); },
                            {"name"});
  for (const std::string name :
       {"reduce", "grad_stats", "advance_step", "scale_gradients", update}) {
    expect_error<usage_error>(
        [&] { builder.add_foreign_work({.name = name, .node = "grad_stats"}); },
        {"'" + name + "'", "taken"});
  }
}

TEST(ForeignWork, NodeThatTheStepDoesNotHaveIsRefusedWithThoseItHas) {
  host_tensor tensor;
  expect_error<usage_error>(
      [&] {
        plan_with(tensor, {{"reduce", foreign_order::after, "scale_gradients"}});
      },
      {"'reduce'", "'scale_gradients'", "grad_stats", update});
  expect_error<usage_error>(
      [&] {
        plan_with(tensor, {{"reduce", foreign_order::after, ""}});
      },
      {"'reduce'", "grad_stats"});
  // Foreign work is no point of the step.
  expect_error<usage_error>(
      [&] {
        plan_with(tensor, {{"first", foreign_order::after, update},
                           {"second", foreign_order::after, "first"}});
      },
      {"'second'", "'first'"});
}

TEST(ForeignWork, OnlyIfAppliedIsRefusedBeforeTheStepHasAdvanced) {
  host_tensor tensor;
  const auto refuse = [&](foreign_order when, const std::string& node, const step_options& options,
                          const std::string& advance) {
    expect_error<usage_error>(
        [&] {
          plan_with(tensor, {{"mean", when, node, true}}, options);
        },
        {"'mean'", "only_if_applied", "'" + node + "'", "'" + advance + "'"});
  };
  refuse(foreign_order::before, "grad_stats", {.skip_non_finite = true}, "grad_stats");
  refuse(foreign_order::before, "advance_step", {}, "advance_step");
  refuse(foreign_order::after, "grad_stats", {.exchange_totals = true}, "advance_step");
  plan_with(tensor, {{"mean", foreign_order::after, "grad_stats", true}});
  plan_with(tensor, {{"mean", foreign_order::before, update, true}}, {});
}

TEST(ForeignWork, RefusedBuildLeavesTheBuilderUsable) {
  host_tensor tensor;
  step_builder builder;
  builder.add_tensor(builder.add_group({}), tensor.operands("weight"));
  builder.add_foreign_work({.name = "after stats", .node = "grad_stats"});
  EXPECT_THROW(builder.build(), usage_error);
  builder.set_options({.skip_non_finite = true});
  EXPECT_EQ(builder.build().nodes.size(), 3u);
  EXPECT_EQ(builder.build().nodes.size(), 3u);
}

TEST(HostForeignWork, RunsInItsPlace) {
  host_tensor tensor;
  const step_plan plan = plan_with(tensor, {{"before", foreign_order::before, "grad_stats"},
                                            {"between", foreign_order::after, "grad_stats"},
                                            {"after", foreign_order::after, update}});
  std::vector<std::string> calls;
  host_executor executor(plan, {{"before",
                                 [&] {
                                   calls.push_back("before");
                                   tensor.gradient.assign(tensor.numel, 2.0f);
                                 }},
                                {"between",
                                 [&] {
                                   calls.push_back("between");
                                   tensor.gradient.assign(tensor.numel, 0.0f);
                                 }},
                                {"after", [&] {
                                   calls.push_back("after");
                                   tensor.parameter[0] *= 2.0f;
                                 }}});
  executor.launch();
  EXPECT_THAT(calls, ElementsAre("before", "between", "after"));
  // The norm is that of the first gradient, the update used the second, the doubling came last.
  EXPECT_NEAR(executor.status().grad_norm, 2.0 * std::sqrt(8.0), 1e-12);
  EXPECT_EQ(tensor.parameter[0], 2.0f);
  executor.launch();
  EXPECT_EQ(calls.size(), 6u);
}

TEST(HostForeignWork, OnlyIfAppliedIsLeftOutOfASkippedStep) {
  host_tensor tensor;
  const step_plan plan = plan_with(tensor, {{"always", foreign_order::after, update},
                                            {"applied", foreign_order::after, update, true}});
  int always = 0;
  int applied = 0;
  host_executor executor(plan, {{"always", [&] { ++always; }}, {"applied", [&] { ++applied; }}});
  executor.launch();
  tensor.gradient[3] = std::numeric_limits<float>::infinity();
  executor.launch();
  executor.launch();
  tensor.gradient[3] = 1.0f;
  executor.launch();
  EXPECT_EQ(always, 4);
  EXPECT_EQ(applied, 2);
}

TEST(HostForeignWork, CombinesTotalsBetweenStatisticsAndAdvance) {
  host_tensor tensor;
  double* totals = nullptr;
  host_executor executor(plan_with(tensor, {{"sum", foreign_order::after, "grad_stats"}},
                                   {.max_grad_norm = 1e9, .exchange_totals = true}),
                         {{"sum", [&] { totals[0] *= 4.0; }}});
  totals = executor.totals_address();
  executor.launch();
  EXPECT_NEAR(executor.status().grad_norm, 2.0 * std::sqrt(8.0), 1e-12);
}

TEST(HostForeignWork, MissingEmptyAndSurplusCallbacksAreRefusedByName) {
  host_tensor tensor;
  const step_plan plan = plan_with(tensor, {{"reduce", foreign_order::after, "grad_stats"},
                                            {"mean", foreign_order::after, update}});
  expect_error<usage_error>([&] { host_executor executor(plan); }, {"'reduce'", "no callback"});
  expect_error<usage_error>(
      [&] {
        host_executor executor(plan, {{"reduce", [] {}}});
      },
      {"'mean'", "no callback"});
  expect_error<usage_error>(
      [&] {
        host_executor executor(plan, {{"reduce", [] {}}, {"mean", {}}});
      },
      {"'mean'", "no callback"});
  expect_error<usage_error>(
      [&] {
        host_executor executor(plan, {{"reduce", [] {}}, {"mean", [] {}}, {"sum", [] {}}});
      },
      {"'sum'", "no place"});
  // The step's own nodes cannot be replaced.
  expect_error<usage_error>(
      [&] {
        host_executor executor(plan, {{"reduce", [] {}}, {"mean", [] {}}, {"grad_stats", [] {}}});
      },
      {"'grad_stats'", "no place"});
}

TEST(HostForeignWork, WhatItThrowsPassesOnAndValuesThatDidNotArriveStayPending) {
  host_tensor tensor;
  const step_plan plan = plan_with(tensor, {{"early", foreign_order::before, "grad_stats"},
                                            {"late", foreign_order::after, "grad_stats"}});
  std::string failing = "early";
  const auto work = [&](const std::string& name) {
    return [&failing, name] {
      if (failing == name) throw std::out_of_range("the work of " + name);
    };
  };
  host_executor executor(plan, {{"early", work("early")}, {"late", work("late")}});
  executor.set_learning_rate(0, 0.25);
  expect_error<std::out_of_range>([&] { executor.launch(); }, {"the work of early"});
  EXPECT_EQ(executor.status().step, 0u);
  failing = "late";
  expect_error<std::out_of_range>([&] { executor.launch(); }, {"the work of late"});
  // The step had advanced, with the value, and was not updated.
  EXPECT_EQ(executor.status().step, 1u);
  EXPECT_EQ(executor.status().groups[0].learning_rate, 0.25);
  EXPECT_EQ(tensor.parameter[0], 1.0f);
  executor.set_learning_rate(0, 0.5);
  failing.clear();
  executor.launch();
  EXPECT_EQ(executor.status().groups[0].learning_rate, 0.5);
  EXPECT_THAT(tensor.parameter[0], Not(1.0f));
}

TEST(HostForeignWork, FailedStepWithoutNewValuesRestoresNoneOfTheOldOnes) {
  host_tensor tensor;
  bool fail = false;
  host_executor executor(plan_with(tensor, {{"early", foreign_order::before, "grad_stats"}}),
                         {{"early", [&] {
                             if (fail) throw 1;
                           }}});
  executor.set_group_step(0, 10);
  executor.launch();
  fail = true;
  EXPECT_THROW(executor.launch(), int);
  fail = false;
  executor.launch();
  EXPECT_EQ(executor.status().groups[0].step, 12u);
}

}  // namespace
}  // namespace stepgraph::test
