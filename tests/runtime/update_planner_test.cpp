#include "update_planner.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "runtime/host_tensor.hpp"

namespace stepgraph::test {
namespace {

using detail::update_need;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

/// A plan to bend: groups and tensors by name, in memory that lives as long as the test.
struct draft {
  struct tensor {
    std::string name;
    std::size_t group = 0;
    host_tensor* memory = nullptr;
    bool with_master = false;
  };
  std::vector<group_options> groups = {{.name = "decayed"}, {.name = "plain"}};
  std::vector<tensor> tensors;
  step_options options = {.skip_non_finite = true};

  step_plan plan() const {
    step_builder builder;
    builder.set_options(options);
    for (const group_options& group : groups) builder.add_group(group);
    for (const tensor& each : tensors) {
      tensor_operands operands = each.memory->operands(each.name);
      if (each.with_master) operands.master = each.memory->view(each.memory->master);
      builder.add_tensor(static_cast<group_id>(each.group), operands);
    }
    return builder.build();
  }
};

class UpdatePlanner : public ::testing::Test {
 protected:
  UpdatePlanner() { before.tensors = {{"weight", 0, &weight}, {"bias", 1, &bias}}; }

  update_need need(const draft& after) const {
    const step_plan a = before.plan();
    const step_plan b = after.plan();
    const detail::step_tables tables_a(a);
    const detail::step_tables tables_b(b);
    return detail::plan_update_need({a, tables_a, tables_a.tensors},
                                    {b, tables_b, tables_b.tensors});
  }

  static void expect(const update_need& found, update_path path,
                     const std::vector<std::string>& words, bool is_dearest = true) {
    if (is_dearest) {
      EXPECT_EQ(found.path, path) << name_of(found.path);
    }
    std::vector<std::string> texts;
    for (const auto& reason : found.reasons) texts.push_back(reason.text);
    std::vector<::testing::Matcher<std::string>> all;
    for (const std::string& word : words) all.emplace_back(HasSubstr(word));
    EXPECT_THAT(texts, Contains(::testing::AllOfArray(all)));
  }

  host_tensor weight{100};
  host_tensor bias{10};
  host_tensor other{100};
  draft before;
};

TEST_F(UpdatePlanner, SamePlanNeedsNothing) {
  const update_need found = need(before);
  EXPECT_EQ(found.path, update_path::nothing);
  EXPECT_TRUE(found.reasons.empty());
  EXPECT_TRUE(found.settings.empty());
}

TEST_F(UpdatePlanner, EachHyperparameterIsAScalarWriteThatNamesItsGroup) {
  struct change {
    const char* name;
    setting_field field;
    double value;
    void (*apply)(group_options&);
  };
  const change changes[] = {
      {"learning_rate", setting_field::learning_rate, 0.5,
       [](group_options& group) { group.learning_rate = 0.5; }},
      {"weight_decay", setting_field::weight_decay, 0.25,
       [](group_options& group) { group.weight_decay = 0.25; }},
      {"beta1", setting_field::beta1, 0.5, [](group_options& group) { group.beta1 = 0.5; }},
      {"beta2", setting_field::beta2, 0.5, [](group_options& group) { group.beta2 = 0.5; }},
      {"eps", setting_field::eps, 0.5, [](group_options& group) { group.eps = 0.5; }},
      {"step", setting_field::group_step, 7.0, [](group_options& group) { group.step = 7; }}};
  for (const change& each : changes) {
    SCOPED_TRACE(each.name);
    draft after = before;
    each.apply(after.groups[1]);
    const update_need found = need(after);
    expect(found, update_path::scalar_write, {"group 'plain'", each.name});
    ASSERT_EQ(found.settings.size(), 1u);
    EXPECT_EQ(found.settings[0].group, 1u);
    EXPECT_EQ(found.settings[0].field, each.field);
    EXPECT_EQ(found.settings[0].value, each.value);
    EXPECT_FALSE(found.parts.options);
    EXPECT_FALSE(found.parts.tensors);
  }
}

TEST_F(UpdatePlanner, ScheduleAndModeAreScalarWritesWithoutASetting) {
  draft after = before;
  after.groups[0].mode = weight_decay_mode::l2;
  update_need found = need(after);
  expect(found, update_path::scalar_write, {"group 'decayed'", "mode"});
  EXPECT_TRUE(found.parts.options);
  EXPECT_TRUE(found.settings.empty());

  after = before;
  // A first schedule takes memory, another of its size takes its place.
  after.groups[0].learning_rate_schedule = schedules::constant(0.5);
  found = need(after);
  expect(found, update_path::scalar_write, {"group 'decayed'", "learning_rate_schedule"}, false);
  expect(found, update_path::node_parameters, {"1 segments", "until now 0"});
  before.groups[0].learning_rate_schedule = schedules::constant(0.25);
  found = need(after);
  expect(found, update_path::scalar_write, {"group 'decayed'", "learning_rate_schedule"});
  EXPECT_TRUE(found.parts.options);
  // A rate set by hand gives way to the schedule of the new plan.
  ASSERT_EQ(found.settings.size(), 1u);
  EXPECT_EQ(found.settings[0].field, setting_field::resume_learning_rate);
}

TEST_F(UpdatePlanner, OptionsOfTheStepAreNamed) {
  draft after = before;
  after.options.max_grad_norm = 2.0;
  after.options.loss_scale = 8.0;
  const update_need found = need(after);
  expect(found, update_path::scalar_write, {"max_grad_norm", "0", "2"});
  expect(found, update_path::scalar_write, {"loss_scale", "1", "8"});
  EXPECT_EQ(found.settings.size(), 2u);

  after = before;
  after.options.count_zeros = true;
  expect(need(after), update_path::node_parameters, {"count_zeros"});
}

TEST_F(UpdatePlanner, MovedOperandIsATableWriteThatNamesIt) {
  draft after = before;
  after.tensors[0].memory = &other;
  const update_need found = need(after);
  expect(found, update_path::table_write, {"tensor 'weight'", "exp_avg_sq", "moves"});
  EXPECT_EQ(found.moved.size(), 4u);
  EXPECT_TRUE(found.parts.tensors);
}

TEST_F(UpdatePlanner, ReboundOperandsAreComparedWhereTheyAre) {
  draft after = before;
  after.tensors[0].memory = &other;
  const step_plan a = before.plan();
  const step_plan b = after.plan();
  const detail::step_tables tables_a(a);
  const detail::step_tables tables_b(b);
  // Everything was re-bound to where the new plan has it.
  const update_need found =
      detail::plan_update_need({a, tables_a, tables_b.tensors}, {b, tables_b, tables_b.tensors});
  EXPECT_EQ(found.path, update_path::nothing);
}

TEST_F(UpdatePlanner, TensorOfAnotherGroupIsATableWrite) {
  draft after = before;
  after.tensors[1].group = 0;
  expect(need(after), update_path::table_write, {"tensor 'bias'", "'plain'", "'decayed'"});
}

TEST_F(UpdatePlanner, ResizedTensorIsATableWriteUntilItsChunksDiffer) {
  draft after = before;
  host_tensor longer(200);
  after.tensors[0].memory = &longer;
  expect(need(after), update_path::table_write, {"tensor 'weight'", "100", "200 elements"});
  host_tensor long_one(5000);
  after.tensors[0].memory = &long_one;
  expect(need(after), update_path::node_parameters, {"chunks"});
  expect(need(after), update_path::node_parameters, {"tensor 'weight'", "100", "5000 elements"});
}

TEST_F(UpdatePlanner, TensorsOfAKnownSignatureTakeNodeParameters) {
  draft after = before;
  after.tensors.push_back({"extra", 0, &other});
  expect(need(after), update_path::node_parameters, {"tensor 'extra'", "added", "'decayed'"});
  after = before;
  after.tensors.pop_back();
  expect(need(after), update_path::node_parameters, {"tensor 'bias'", "dropped"});
  after = before;
  std::swap(after.tensors[0], after.tensors[1]);
  expect(need(after), update_path::node_parameters, {"order"});
}

TEST_F(UpdatePlanner, GroupsAreMatchedByName) {
  draft after = before;
  after.groups = {{.name = "plain"}, {.name = "fresh"}};
  after.tensors = {{"weight", 1, &weight}, {"bias", 0, &bias}};
  const update_need found = need(after);
  expect(found, update_path::node_parameters, {"group 'fresh'", "added"});
  expect(found, update_path::node_parameters, {"group 'decayed'", "dropped"});
  EXPECT_EQ(found.group_of_next, (std::vector<std::uint32_t>{1, detail::no_group}));
}

TEST_F(UpdatePlanner, GroupsOfOneNameKeepTheirOrder) {
  before.groups = {{.name = "same"}, {.name = "same"}};
  draft after = before;
  after.groups[1].eps = 0.5;
  const update_need found = need(after);
  EXPECT_EQ(found.group_of_next, (std::vector<std::uint32_t>{0, 1}));
  ASSERT_EQ(found.settings.size(), 1u);
  EXPECT_EQ(found.settings[0].group, 1u);
}

TEST_F(UpdatePlanner, NewSignatureIsAnotherTopologyAndNamesNodeAndEdge) {
  draft after = before;
  after.tensors.push_back({"extra", 0, &other, true});
  const update_need found = need(after);
  expect(found, update_path::instantiate, {"node 'update/f32/f32/f32/f32/f32' appears"});
  expect(found, update_path::instantiate,
         {"edge 'update/f32/f32/none/f32/f32' -> 'update/f32/f32/f32/f32/f32' appears"});
  EXPECT_THAT(detail::reasons_above(found, update_path::node_parameters),
              AllOf(HasSubstr("node 'update"), ::testing::Not(HasSubstr("extra"))));
}

TEST_F(UpdatePlanner, AnotherKernelInTheSamePlaceTakesNodeParameters) {
  draft after = before;
  for (auto& tensor : after.tensors) tensor.with_master = true;
  const update_need found = need(after);
  expect(found, update_path::node_parameters, {"node 'update/f32/f32/none/f32/f32' goes"});
  expect(found, update_path::node_parameters, {"node 'update/f32/f32/f32/f32/f32' appears"});
}

TEST_F(UpdatePlanner, NodeThatGoesIsNamed) {
  draft after = before;
  before.tensors.push_back({"extra", 0, &other, true});
  expect(need(after), update_path::instantiate, {"node 'update/f32/f32/f32/f32/f32' goes"});
}

TEST_F(UpdatePlanner, RecordsTakeNodeParameters) {
  draft after = before;
  after.options.record_capacity = 4;
  expect(need(after), update_path::node_parameters, {"record_capacity"});
}

TEST_F(UpdatePlanner, LongListsOfReasonsAreCut) {
  std::vector<host_tensor> many(10);
  draft after = before;
  for (std::size_t t = 0; t < many.size(); ++t) {
    after.tensors.push_back({"extra" + std::to_string(t), 0, &many[t]});
  }
  EXPECT_THAT(detail::reasons_above(need(after), update_path::nothing), HasSubstr("6 more"));
}

TEST(UpdatePath, NamesAreThoseOfTheEnumerators) {
  EXPECT_STREQ(name_of(update_path::nothing), "nothing");
  EXPECT_STREQ(name_of(update_path::scalar_write), "scalar_write");
  EXPECT_STREQ(name_of(update_path::table_write), "table_write");
  EXPECT_STREQ(name_of(update_path::node_parameters), "node_parameters");
  EXPECT_STREQ(name_of(update_path::graph_update), "graph_update");
  EXPECT_STREQ(name_of(update_path::instantiate), "instantiate");
}

}  // namespace
}  // namespace stepgraph::test
