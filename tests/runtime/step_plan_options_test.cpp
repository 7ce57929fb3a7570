#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/expect_error.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/kernels/launch_shape.hpp"
#include "stepgraph/step_builder.hpp"

// Which nodes the options of a step make, in which order and with which launches.
namespace stepgraph::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// A builder of shapes: two tensors, and gradients alone if asked for.
step_builder builder_of(const step_options& options, bool gradients_alone = false) {
  step_builder builder(plan_purpose::inspect);
  builder.set_options(options);
  builder.add_group({});
  for (const std::uint64_t numel : {5000u, 100u}) {
    const tensor_view view = {nullptr, numel};
    builder.add_tensor(0, {.name = std::to_string(numel),
                           .parameter = view,
                           .gradient = view,
                           .exp_avg = view,
                           .exp_avg_sq = view});
  }
  if (gradients_alone) {
    builder.add_gradient(0, "alone", {nullptr, 3000, storage_format::bf16});
    builder.add_gradient(0, "empty", {nullptr, 0, storage_format::f16});
  }
  return builder;
}

std::vector<std::string> nodes_of(const step_plan& plan) {
  std::vector<std::string> names;
  for (const plan_node& node : plan.nodes) names.push_back(node.name);
  return names;
}

std::vector<std::string> nodes_of(const step_options& options, bool gradients_alone = false) {
  const step_plan plan = builder_of(options, gradients_alone).build();
  EXPECT_EQ(plan.edges.size() + 1, plan.nodes.size());
  return nodes_of(plan);
}

const std::string update = "update/f32/f32/none/f32/f32";

TEST(StepPlanOptions, EveryOptionThatNeedsTheNormMeasuresIt) {
  step_options scaled;
  scaled.scaling = megatron_loss_scaling();
  for (const step_options& options :
       {step_options{.skip_non_finite = true}, step_options{.max_grad_norm = 1.0},
        step_options{.skip_above_norm = 1.0}, step_options{.measure_norm = true},
        step_options{.count_zeros = true}, scaled}) {
    EXPECT_TRUE(measures_gradients(options));
    EXPECT_THAT(nodes_of(options), ElementsAre("grad_stats", update));
  }
}

TEST(StepPlanOptions, OptionsWithoutTheNormDoNot) {
  const float input = 0.0f;
  for (const step_options& options :
       {step_options{}, step_options{.norm = norm_kind::infinity},
        step_options{.zero_gradients = true}, step_options{.unscale_gradients = true},
        step_options{.found_inf_input = &input}, step_options{.loss_scale_input = &input},
        step_options{.samples_per_step = 8}}) {
    EXPECT_FALSE(measures_gradients(options));
    EXPECT_THAT(nodes_of(options), ElementsAre("advance_step", update));
  }
}

TEST(StepPlanOptions, ClippingAndScalingRulesSkipOnWhatIsNotFinite) {
  step_options scaled;
  scaled.scaling.rule = loss_scale_rule::torch_amp;
  EXPECT_TRUE(skips_non_finite(scaled));
  EXPECT_TRUE(skips_non_finite({.max_grad_norm = 1.0}));
  EXPECT_FALSE(skips_non_finite({.skip_above_norm = 1.0}));
  EXPECT_FALSE(skips_non_finite({.measure_norm = true}));
}

TEST(StepPlanOptions, ExchangedTotalsHaveAnAdvanceOfTheirOwn) {
  const step_options options = {.exchange_totals = true};
  EXPECT_THAT(nodes_of(options), ElementsAre("grad_stats", "advance_step", update));
  const step_plan plan = builder_of(options).build();
  EXPECT_EQ(plan.nodes[0].blocks, statistics_blocks(4) + 1) << "one more adds up";
  EXPECT_EQ(plan.nodes[1].blocks, 1u);
  EXPECT_EQ(plan.nodes[1].threads, advance_step_threads);
}

TEST(StepPlanOptions, RecordsNeedNoNode) {
  EXPECT_THAT(nodes_of({.record_capacity = 4}), ElementsAre("advance_step", update));
  EXPECT_THAT(nodes_of({.skip_non_finite = true, .record_capacity = 4}),
              ElementsAre("grad_stats", update));
}

TEST(StepPlanOptions, GradientsAloneAreScaledOnlyWhenAskedFor) {
  EXPECT_THAT(nodes_of({}, true), ElementsAre("advance_step", update));
  EXPECT_THAT(nodes_of({.measure_norm = true}, true), ElementsAre("grad_stats", update));
  EXPECT_THAT(nodes_of({.unscale_gradients = true}, true),
              ElementsAre("advance_step", "scale_gradients", update));
  const step_plan plan =
      builder_of({.measure_norm = true, .unscale_gradients = true, .record_capacity = 1}, true)
          .build();
  EXPECT_THAT(nodes_of(plan), ElementsAre("grad_stats", "scale_gradients", update));
  EXPECT_THAT(plan.nodes[0].tensors, ElementsAre(0, 1, 2));
  EXPECT_EQ(plan.nodes[0].bytes_read, 5100u * 4 + 3000u * 2);
  EXPECT_THAT(plan.nodes[1].tensors, ElementsAre(2));
  EXPECT_EQ(plan.nodes[1].blocks, 2u);
  EXPECT_EQ(plan.nodes[1].threads, statistics_threads);
  EXPECT_EQ(plan.nodes[1].bytes_read, 6000u);
  EXPECT_EQ(plan.nodes[1].bytes_written, 6000u);
  EXPECT_EQ(plan.parameter_count(), 5100u) << "a gradient alone is no parameter";
}

TEST(StepPlanOptions, EveryCombinationHasItsNodesInOrder) {
  for (unsigned bits = 0; bits < 128; ++bits) {
    const auto has = [bits](unsigned bit) { return (bits >> bit & 1) != 0; };
    step_options options;
    options.skip_non_finite = has(0);
    options.count_zeros = has(1);
    options.exchange_totals = has(2);
    options.unscale_gradients = has(3);
    options.record_capacity = has(4) ? 2 : 0;
    options.skip_above_norm = has(5) ? 9.0 : 0.0;
    const bool alone = has(6);
    const bool measured = has(0) || has(1) || has(2) || has(5);
    std::vector<std::string> expected;
    if (measured) expected.push_back("grad_stats");
    if (!measured || has(2)) expected.push_back("advance_step");
    if (has(3) && alone) expected.push_back("scale_gradients");
    expected.push_back(update);
    const step_plan plan = builder_of(options, alone).build();
    EXPECT_EQ(nodes_of(plan), expected) << bits;
    const std::string dot = to_dot(plan);
    for (const std::string& name : expected) EXPECT_NE(dot.find(name), std::string::npos) << name;
  }
}

TEST(StepPlanOptions, GradientsMayBeAllThereIs) {
  step_builder builder(plan_purpose::inspect);
  builder.set_options({.max_grad_norm = 1.0, .unscale_gradients = true});
  builder.add_group({});
  builder.add_gradient(0, "alone", {nullptr, 10});
  EXPECT_THAT(nodes_of(builder.build()), ElementsAre("grad_stats", "scale_gradients"));
}

/// The nodes that write the step's record.
std::vector<std::string> record_writers_of(const step_plan& plan) {
  std::vector<std::string> names;
  for (const plan_node& node : plan.nodes) {
    if (node.writes_record) names.push_back(node.name);
  }
  return names;
}

// By a block of its own, while the others update.
TEST(StepPlanOptions, TheLargestUpdateWritesTheRecord) {
  const auto builder_with = [](std::uint32_t capacity) {
    step_builder builder = builder_of({.skip_non_finite = true, .record_capacity = capacity});
    for (const auto& [name, numel] : {std::pair{"larger", 9000u}, std::pair{"smaller", 2000u}}) {
      const tensor_view view = {nullptr, numel};
      const storage_format format = numel == 9000u ? storage_format::bf16 : storage_format::f16;
      builder.add_tensor(0, {.name = name,
                             .parameter = {nullptr, numel, format},
                             .gradient = view,
                             .exp_avg = view,
                             .exp_avg_sq = view});
    }
    return builder;
  };
  const step_plan without = builder_with(0).build();
  const step_plan with = builder_with(8).build();
  const std::string larger = "update/bf16/f32/none/f32/f32";
  EXPECT_THAT(record_writers_of(without), IsEmpty());
  EXPECT_THAT(record_writers_of(with), ElementsAre(larger));
  for (std::size_t i = 0; i < with.nodes.size(); ++i) {
    const plan_node& node = with.nodes[i];
    EXPECT_EQ(node.blocks, without.nodes[i].blocks + (node.name == larger ? 1 : 0)) << node.name;
  }
  EXPECT_THAT(to_dot(with), HasSubstr("writes the record"));
  EXPECT_THAT(to_dot(without), Not(HasSubstr("writes the record")));
}

TEST(StepPlanOptions, TheNodeThatAdvancesTheStepWritesTheRecordWhereNoUpdateCan) {
  EXPECT_THAT(record_writers_of(builder_of({.record_capacity = 1}).build()), ElementsAre(update));
  // Foreign work in between may fail.
  step_builder builder = builder_of({.skip_non_finite = true, .record_capacity = 1});
  builder.add_foreign_work({.name = "mean", .node = "grad_stats"});
  EXPECT_THAT(record_writers_of(builder.build()), ElementsAre("grad_stats"));
  // What comes before the advance, or after the update, does not matter.
  step_builder exchanging = builder_of({.exchange_totals = true, .record_capacity = 1});
  exchanging.add_foreign_work({.name = "exchange", .node = "grad_stats"});
  exchanging.add_foreign_work({.name = "mean", .node = update});
  EXPECT_THAT(record_writers_of(exchanging.build()), ElementsAre(update));
  step_builder gradients(plan_purpose::inspect);
  gradients.set_options({.max_grad_norm = 1.0, .unscale_gradients = true, .record_capacity = 1});
  gradients.add_group({});
  gradients.add_gradient(0, "alone", {nullptr, 10});
  EXPECT_THAT(record_writers_of(gradients.build()), ElementsAre("grad_stats"));
  EXPECT_EQ(gradients.build().nodes[0].blocks, 2u);
}

TEST(StepPlanOptions, UnscalingWritesTheGradientsOfAnUpdate) {
  const auto written = [](const step_options& options) {
    return builder_of(options).build().nodes.back().bytes_written;
  };
  EXPECT_EQ(written({.unscale_gradients = true}), written({}) + 5100u * 4);
  EXPECT_EQ(written({.zero_gradients = true}), written({}) + 5100u * 4);
}

TEST(StepPlanOptions, NormGroupsAreNumberedAsTheyAreNamed) {
  step_builder builder(plan_purpose::inspect);
  for (const char* name : {"dense", "", "experts", "dense", ""}) {
    builder.add_group({.norm_group = name});
  }
  const step_plan plan = builder.build();
  EXPECT_THAT(plan.norm_groups, ElementsAre("dense", "", "experts"));
  EXPECT_THAT(plan.norm_group_of, ElementsAre(0, 1, 2, 0, 1));
  EXPECT_THAT(step_builder().build().norm_groups, ElementsAre(""));
}

// Each norm group is filled up to whole blocks of grad_stats.
TEST(StepPlanOptions, NormGroupsOfALongListHaveBlocksOfTheirOwn) {
  step_builder builder(plan_purpose::inspect);
  builder.set_options({.measure_norm = true});
  std::uint64_t blocks = prepare_blocks(4);
  for (const std::uint64_t chunks : {5u, 1u, 0u, 4093u}) {
    const group_id group = builder.add_group({.norm_group = "norm " + std::to_string(chunks)});
    builder.add_gradient(group, std::to_string(chunks), {nullptr, chunks * chunk_elements});
    blocks += (chunks + 3) / 4;
  }
  EXPECT_EQ(builder.build().nodes[0].blocks, blocks);
}

TEST(StepPlanOptions, GradientAloneIsCheckedAsATensorIs) {
  float memory[4] = {};
  step_builder builder;
  builder.add_group({});
  const tensor_view good = {memory, 4};
  const auto refused = [&](group_id group, const char* name, tensor_view view,
                           const std::vector<std::string>& words) {
    expect_error<usage_error>([&] { builder.add_gradient(group, name, view); }, words);
  };
  refused(1, "bent", good, {"bent", "group 1"});
  refused(0, "", good, {"name"});
  refused(0, "bent", {nullptr, 4}, {"bent", "gradient", "null"});
  refused(0, "bent", {memory, 4, storage_format::e4m3}, {"bent", "gradient", "e4m3", "bf16"});
  refused(0, "bent", {memory, 4, storage_format::none}, {"bent", "gradient", "format"});
  refused(0, "bent", {reinterpret_cast<std::byte*>(memory) + 1, 2, storage_format::f16},
          {"bent", "gradient", "2 bytes"});
  builder.add_gradient(0, "good", good);
  refused(0, "good", good, {"good", "taken"});
  refused(0, "bent", {memory, 4, storage_format::f32, {device_kind::cuda, 0}},
          {"bent", "cuda:0", "host", "good"});
  EXPECT_EQ(builder.build().tensors.size(), 1u);
  builder.add_gradient(0, "twice", {memory + 3, 1});
  expect_error<usage_error>([&] { builder.build(); }, {"good", "twice", "gradient", "memory"});
}

}  // namespace
}  // namespace stepgraph::test
