#include "stepgraph/step_builder.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "common/expect_error.hpp"
#include "common/warmed_up.hpp"
#include "runtime/host_tensor.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/host_executor.hpp"

namespace stepgraph::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

struct refusal {
  const char* name;
  std::vector<std::string> words;
};

/// Expects a builder to refuse, to be as it was before, and to go on.
class refused_builder {
 public:
  refused_builder() {
    builder_.add_group({.name = "group"});
    builder_.add_tensor(0, before_.operands("before"));
  }

  void expect_refusal(const std::function<void(step_builder&)>& call,
                      const std::vector<std::string>& words) {
    expect_error<usage_error>([&] { call(builder_); }, words);
    const step_plan unchanged = builder_.build();
    EXPECT_EQ(unchanged.groups.size(), 1u);
    EXPECT_EQ(unchanged.tensors.size(), 1u);
    EXPECT_EQ(unchanged.options.loss_scale, 1.0);
    EXPECT_EQ(unchanged.options.max_grad_norm, 0.0);
    builder_.add_tensor(0, after_.operands("bent"));
    EXPECT_EQ(builder_.build().tensors.size(), 2u);
    host_executor(builder_.build()).launch();
  }

 private:
  host_tensor before_;
  host_tensor after_;
  step_builder builder_;
};

/// A tensor called "bent" that `bend` has made wrong.
struct tensor_refusal : refusal {
  std::function<void(tensor_operands&, host_tensor&)> bend;
};

void* moved_by(void* memory, std::size_t bytes) { return static_cast<std::byte*>(memory) + bytes; }

std::vector<tensor_refusal> tensor_refusals() {
  std::vector<tensor_refusal> refusals = {
      {{"A04_no_gradient", {"bent", "gradient"}},
       [](tensor_operands& t, host_tensor&) { t.gradient.reset(); }},
      {{"gradient_of_another_size", {"bent", "gradient", "7", "8"}},
       [](tensor_operands& t, host_tensor&) { t.gradient->numel = 7; }},
      {{"master_of_another_size", {"bent", "master", "9", "8"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.master = memory.view(memory.master);
         t.master->numel = 9;
       }},
      {{"exp_avg_of_another_size", {"bent", "exp_avg", "0", "8"}},
       [](tensor_operands& t, host_tensor&) { t.exp_avg.numel = 0; }},
      {{"exp_avg_sq_of_another_size", {"bent", "exp_avg_sq", "16", "8"}},
       [](tensor_operands& t, host_tensor&) { t.exp_avg_sq.numel = 16; }},
      {{"gradient_on_another_device", {"bent", "gradient", "cuda:1", "host"}},
       [](tensor_operands& t, host_tensor&) {
         t.gradient->device = {device_kind::cuda, 1};
       }},
      {{"all_on_another_device", {"bent", "cuda:0", "host", "before"}},
       [](tensor_operands& t, host_tensor&) {
         for (tensor_view* view : {&t.parameter, &*t.gradient, &t.exp_avg, &t.exp_avg_sq}) {
           view->device = {device_kind::cuda, 0};
         }
       }},
      {{"null_parameter", {"bent", "parameter", "null", "8"}},
       [](tensor_operands& t, host_tensor&) { t.parameter.data = nullptr; }},
      {{"null_gradient", {"bent", "gradient", "null"}},
       [](tensor_operands& t, host_tensor&) { t.gradient->data = nullptr; }},
      {{"null_exp_avg_sq", {"bent", "exp_avg_sq", "null"}},
       [](tensor_operands& t, host_tensor&) { t.exp_avg_sq.data = nullptr; }},
      {{"misaligned_f32", {"bent", "exp_avg", "4 bytes", "f32"}},
       [](tensor_operands& t, host_tensor&) { t.exp_avg.data = moved_by(t.exp_avg.data, 2); }},
      {{"misaligned_bf16", {"bent", "gradient", "2 bytes", "bf16"}},
       [](tensor_operands& t, host_tensor&) {
         t.gradient->format = storage_format::bf16;
         t.gradient->data = moved_by(t.gradient->data, 1);
       }},
      {{"name_already_taken", {"before", "taken"}},
       [](tensor_operands& t, host_tensor&) { t.name = "before"; }},
      {{"no_name", {"name"}}, [](tensor_operands& t, host_tensor&) { t.name.clear(); }},
      {{"parameter_of_no_format", {"bent", "parameter", "format"}},
       [](tensor_operands& t, host_tensor&) { t.parameter.format = storage_format::none; }},
      {{"gradient_of_no_format", {"bent", "gradient", "format"}},
       [](tensor_operands& t, host_tensor&) { t.gradient->format = storage_format::none; }},
      {{"master_in_bf16", {"bent", "master", "bf16", "remainder"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.master = memory.view(memory.master);
         t.master->format = storage_format::bf16;
       }},
      {{"remainder_of_an_f32_parameter", {"bent", "parameter", "f32", "bf16", "remainder"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.master = memory.view(memory.master);
         t.master->format = storage_format::remainder;
       }},
      {{"fp8_gradient", {"bent", "gradient", "e4m3", "bf16"}},
       [](tensor_operands& t, host_tensor&) { t.gradient->format = storage_format::e4m3; }},
      {{"e5m2_moment", {"bent", "exp_avg", "e5m2", "e4m3"}},
       [](tensor_operands& t, host_tensor&) { t.exp_avg.format = storage_format::e5m2; }},
      {{"remainder_as_moment", {"bent", "exp_avg_sq", "remainder"}},
       [](tensor_operands& t, host_tensor&) { t.exp_avg_sq.format = storage_format::remainder; }},
      {{"maximum_of_another_format", {"bent", "max_exp_avg_sq", "bf16", "format of exp_avg_sq"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.max_exp_avg_sq = memory.view(memory.master);
         t.max_exp_avg_sq->format = storage_format::bf16;
       }},
      {{"maximum_of_another_size", {"bent", "max_exp_avg_sq", "9", "8"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.max_exp_avg_sq = memory.view(memory.master);
         t.max_exp_avg_sq->numel = 9;
       }},
      {{"f16_moment_without_scales", {"bent", "exp_avg", "f16", "scales", "1 scale"}},
       [](tensor_operands& t, host_tensor&) { t.exp_avg.format = storage_format::f16; }},
      {{"e4m3_moment_without_scales", {"bent", "exp_avg_sq", "e4m3", "scales", "1 scale"}},
       [](tensor_operands& t, host_tensor&) { t.exp_avg_sq.format = storage_format::e4m3; }},
      {{"f16_master_without_scales", {"bent", "master", "f16", "scales", "1 scale"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.master = memory.view(memory.master);
         t.master->format = storage_format::f16;
       }},
      {{"maximum_without_scales", {"bent", "max_exp_avg_sq", "f16", "scales", "1 scale"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.exp_avg_sq.format = storage_format::f16;
         t.exp_avg_sq.scales = memory.scales.data();
         t.max_exp_avg_sq = memory.view(memory.master);
         t.max_exp_avg_sq->format = storage_format::f16;
       }},
      {{"e4m3_parameter_without_scaling", {"bent", "parameter", "e4m3", "scale_inv"}},
       [](tensor_operands& t, host_tensor&) { t.parameter.format = storage_format::e4m3; }},
      {{"e5m2_parameter_without_scaling", {"bent", "parameter", "e5m2", "amax"}},
       [](tensor_operands& t, host_tensor&) { t.parameter.format = storage_format::e5m2; }},
      {{"scaling_without_amax", {"bent", "amax", "null"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.parameter.format = storage_format::e4m3;
         t.parameter_scaling = memory.scaling();
         t.parameter_scaling->amax = nullptr;
       }},
      {{"scaling_without_scale_inv", {"bent", "scale_inv", "null"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.parameter.format = storage_format::e5m2;
         t.parameter_scaling = memory.scaling();
         t.parameter_scaling->scale_inv = nullptr;
       }},
      {{"misaligned_scale", {"bent", "scale", "4 bytes"}},
       [](tensor_operands& t, host_tensor& memory) {
         t.parameter.format = storage_format::e4m3;
         t.parameter_scaling = memory.scaling();
         t.parameter_scaling->scale =
             static_cast<const float*>(moved_by(memory.scale_numbers.data(), 2));
       }},
      {{"more_elements_than_memory", {"bent", "18446744073709551615"}},
       [](tensor_operands& t, host_tensor&) {
         for (tensor_view* view : {&t.parameter, &*t.gradient, &t.exp_avg, &t.exp_avg_sq}) {
           view->numel = std::numeric_limits<std::uint64_t>::max();
         }
       }},
  };
  return refusals;
}

class StepBuilderTensor : public ::testing::TestWithParam<tensor_refusal> {};

INSTANTIATE_TEST_SUITE_P(Refuses, StepBuilderTensor, ::testing::ValuesIn(tensor_refusals()),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(StepBuilderTensor, NamesTheTensorAndGoesOn) {
  host_tensor memory;
  tensor_operands operands = memory.operands("bent");
  GetParam().bend(operands, memory);
  refused_builder().expect_refusal([&](step_builder& builder) { builder.add_tensor(0, operands); },
                                   GetParam().words);
}

TEST(StepBuilder, TensorOfAMissingGroupIsRefused) {
  host_tensor memory;
  refused_builder().expect_refusal(
      [&](step_builder& builder) { builder.add_tensor(1, memory.operands("bent")); },
      {"bent", "group 1", "1 group"});
}

/// A group called "bent" that is wrong in one option.
struct group_refusal : refusal {
  group_options options;
};

/// A schedule that rises and falls linearly, with what is wrong in it.
schedule bent_schedule(void (*bend)(schedule&)) {
  schedule bent = warmed_up(learning_rate_style::linear, 0.0, 1.0, 0.0, 1, 9);
  bend(bent);
  return bent;
}

std::vector<group_refusal> group_refusals() {
  std::vector<group_refusal> refusals;
  const auto add = [&](const char* name, std::vector<std::string> words, group_options options) {
    options.name = "bent";
    words.push_back("bent");
    refusals.push_back({{name, std::move(words)}, options});
  };
  add("negative_learning_rate", {"learning_rate", "-0.5"}, {.learning_rate = -0.5});
  add("nan_learning_rate", {"learning_rate", "nan"}, {.learning_rate = nan});
  add("infinite_learning_rate", {"learning_rate", "inf"}, {.learning_rate = infinity});
  add("beta1_of_one", {"beta1", "1", "[0, 1)"}, {.beta1 = 1.0});
  add("negative_beta1", {"beta1", "-0.1"}, {.beta1 = -0.1});
  add("nan_beta1", {"beta1", "nan"}, {.beta1 = nan});
  add("beta2_of_one", {"beta2", "[0, 1)"}, {.beta2 = 1.0});
  add("large_beta2", {"beta2", "2"}, {.beta2 = 2.0});
  add("nan_beta2", {"beta2", "nan"}, {.beta2 = nan});
  add("negative_eps", {"eps", "-1e-08"}, {.eps = -1e-8});
  add("infinite_eps", {"eps", "inf"}, {.eps = infinity});
  add("negative_weight_decay", {"weight_decay", "-0.01"}, {.weight_decay = -0.01});
  add("nan_weight_decay", {"weight_decay", "nan"}, {.weight_decay = nan});
  add("schedule_without_segments", {"learning_rate_schedule", "segment"},
      {.learning_rate_schedule = bent_schedule([](schedule& s) { s.segments.clear(); })});
  add("schedule_with_a_nan", {"learning_rate_schedule", "nan"},
      {.learning_rate_schedule = bent_schedule([](schedule& s) { s.segments[0].to = nan; })});
  add("weight_decay_schedule_with_a_negative_number", {"weight_decay_schedule", "-1"},
      {.weight_decay_schedule = bent_schedule([](schedule& s) { s.segments[0].from = -1.0; })});
  return refusals;
}

class StepBuilderGroup : public ::testing::TestWithParam<group_refusal> {};

INSTANTIATE_TEST_SUITE_P(Refuses, StepBuilderGroup, ::testing::ValuesIn(group_refusals()),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(StepBuilderGroup, NamesTheGroupAndGoesOn) {
  refused_builder().expect_refusal(
      [](step_builder& builder) { builder.add_group(GetParam().options); }, GetParam().words);
}

TEST(StepBuilder, EdgesOfTheRangesAreAccepted) {
  step_builder builder;
  builder.add_group({.learning_rate = 0.0, .beta1 = 0.0, .beta2 = 0.0, .eps = 0.0});
  builder.set_options({.max_grad_norm = infinity, .loss_scale = 1e-30});
  EXPECT_EQ(builder.build().groups.size(), 1u);
}

struct option_refusal : refusal {
  step_options options;
};

/// Options whose scaling rule is torch_amp or megatron and wrong in one number.
step_options scaled_by(loss_scale_rule rule, void (*bend)(loss_scaling&)) {
  step_options options;
  options.scaling.rule = rule;
  bend(options.scaling);
  return options;
}

constexpr loss_scale_rule torch_amp = loss_scale_rule::torch_amp;
constexpr loss_scale_rule megatron = loss_scale_rule::megatron;
constexpr float some_input = 1.0f;

const option_refusal option_refusals[] = {
    {{"zero_loss_scale", {"loss_scale", "0"}}, {.loss_scale = 0.0}},
    {{"negative_loss_scale", {"loss_scale", "-2"}}, {.loss_scale = -2.0}},
    {{"infinite_loss_scale", {"loss_scale", "inf"}}, {.loss_scale = infinity}},
    {{"nan_loss_scale", {"loss_scale", "nan"}}, {.loss_scale = nan}},
    {{"negative_max_grad_norm", {"max_grad_norm", "-1"}}, {.max_grad_norm = -1.0}},
    {{"nan_max_grad_norm", {"max_grad_norm", "nan"}}, {.max_grad_norm = nan}},
    {{"loss_scale_that_is_infinite_in_f32", {"loss_scale", "1e+39", "f32"}}, {.loss_scale = 1e39}},
    {{"loss_scale_that_is_zero_in_f32", {"loss_scale", "1e-50", "f32"}}, {.loss_scale = 1e-50}},
    {{"negative_skip_above_norm", {"skip_above_norm", "-1"}}, {.skip_above_norm = -1.0}},
    {{"nan_skip_above_norm", {"skip_above_norm", "nan"}}, {.skip_above_norm = nan}},
    {{"growth_below_one", {"growth_factor", "0.5", "1"}},
     scaled_by(torch_amp, [](auto& s) { s.growth_factor = 0.5; })},
    {{"infinite_growth", {"growth_factor", "inf"}},
     scaled_by(megatron, [](auto& s) { s.growth_factor = infinity; })},
    {{"nan_growth", {"growth_factor", "nan"}},
     scaled_by(torch_amp, [](auto& s) { s.growth_factor = nan; })},
    {{"backoff_above_one", {"backoff_factor", "2", "(0, 1]"}},
     scaled_by(torch_amp, [](auto& s) { s.backoff_factor = 2.0; })},
    {{"backoff_of_zero", {"backoff_factor", "0", "(0, 1]"}},
     scaled_by(megatron, [](auto& s) { s.backoff_factor = 0.0; })},
    {{"nan_backoff", {"backoff_factor", "nan"}},
     scaled_by(megatron, [](auto& s) { s.backoff_factor = nan; })},
    {{"growth_interval_of_zero", {"growth_interval", "0"}},
     scaled_by(torch_amp, [](auto& s) { s.growth_interval = 0; })},
    {{"hysteresis_of_zero", {"hysteresis", "0", "1"}},
     scaled_by(megatron, [](auto& s) { s.hysteresis = 0; })},
    {{"negative_minimum", {"minimum", "-1"}},
     scaled_by(megatron, [](auto& s) { s.minimum = -1.0; })},
    {{"infinite_minimum", {"minimum", "inf"}},
     scaled_by(megatron, [](auto& s) { s.minimum = infinity; })},
    {{"scale_input_beside_a_rule", {"loss_scale_input", "fixed"}},
     {.scaling = {.rule = loss_scale_rule::torch_amp}, .loss_scale_input = &some_input}},
    {{"zeroed_and_unscaled_gradients", {"zero_gradients", "unscale_gradients"}},
     {.zero_gradients = true, .unscale_gradients = true}},
};

class StepBuilderOptions : public ::testing::TestWithParam<option_refusal> {};

INSTANTIATE_TEST_SUITE_P(Refuses, StepBuilderOptions, ::testing::ValuesIn(option_refusals),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(StepBuilderOptions, NamesTheOptionAndGoesOn) {
  refused_builder().expect_refusal(
      [](step_builder& builder) { builder.set_options(GetParam().options); }, GetParam().words);
}

TEST(StepBuilder, NumbersOfAScalingRuleAreCheckedOnlyWhereThereIsOne) {
  step_builder builder;
  step_options options = scaled_by(loss_scale_rule::fixed, [](auto& s) { s.growth_factor = 0.0; });
  options.loss_scale_input = &some_input;
  builder.set_options(options);
  EXPECT_EQ(builder.build().options.loss_scale_input, &some_input);
}

TEST(StepBuilder, MoreNormGroupsThanAStepHoldsAreRefused) {
  step_builder builder;
  for (int group = 0; group < 64; ++group) {
    builder.add_group({.norm_group = "norm " + std::to_string(group)});
  }
  EXPECT_EQ(builder.build().norm_groups.size(), 64u);
  builder.add_group({.norm_group = "one too many"});
  expect_error<usage_error>([&] { builder.build(); }, {"65", "norm groups", "64"});
}

TEST(StepBuilderOverlap, OperandsOfOneTensorThatShareMemoryAreRefused) {
  host_tensor memory;
  tensor_operands operands = memory.operands("bent");
  operands.exp_avg_sq = operands.exp_avg;
  step_builder builder;
  builder.add_tensor(builder.add_group({}), operands);
  expect_error<usage_error>([&] { builder.build(); }, {"bent", "exp_avg", "exp_avg_sq", "memory"});
}

TEST(StepBuilderOverlap, TensorsThatShareOneByteAreRefused) {
  host_tensor first(16);
  host_tensor second(16);
  tensor_operands operands = second.operands("second");
  // Starts at the last element of the first tensor's gradient.
  operands.gradient->data = first.gradient.data() + 15;
  operands.gradient->numel = operands.parameter.numel = operands.exp_avg.numel =
      operands.exp_avg_sq.numel = 1;
  step_builder builder;
  builder.add_group({});
  builder.add_tensor(0, first.operands("first"));
  builder.add_tensor(0, operands);
  expect_error<usage_error>([&] { builder.build(); }, {"first", "second", "gradient"});
}

TEST(StepBuilderOverlap, ScalesThatShareMemoryAreRefused) {
  host_tensor memory;
  tensor_operands operands = memory.operands("bent");
  for (tensor_view* view : {&operands.exp_avg, &operands.exp_avg_sq}) {
    view->format = storage_format::e4m3;
    view->scales = memory.scales.data();
  }
  step_builder builder;
  builder.add_tensor(builder.add_group({}), operands);
  expect_error<usage_error>([&] { builder.build(); }, {"bent", "exp_avg", "exp_avg_sq", "memory"});
}

TEST(StepBuilderOverlap, ScalesInsideAnotherOperandAreRefused) {
  host_tensor memory;
  tensor_operands operands = memory.operands("bent");
  operands.exp_avg_sq.format = storage_format::f16;
  operands.exp_avg_sq.scales = static_cast<std::uint8_t*>(moved_by(operands.parameter.data, 3));
  step_builder builder;
  builder.add_tensor(builder.add_group({}), operands);
  expect_error<usage_error>([&] { builder.build(); }, {"bent", "parameter", "exp_avg_sq"});
}

TEST(StepBuilderOverlap, NeighboursAreAccepted) {
  std::vector<float> arena(4 * 16, 0.0f);
  const auto part = [&](std::size_t index) { return tensor_view{arena.data() + 16 * index, 16}; };
  step_builder builder;
  builder.add_tensor(builder.add_group({}), {.name = "tensor",
                                             .parameter = part(0),
                                             .gradient = part(1),
                                             .exp_avg = part(3),
                                             .exp_avg_sq = part(2)});
  EXPECT_EQ(builder.build().tensors.size(), 1u);
}

TEST(StepBuilder, EmptyTensorNeedsNoMemory) {
  step_builder builder;
  const tensor_view nothing = {nullptr, 0};
  builder.add_tensor(builder.add_group({}), {.name = "empty",
                                             .parameter = nothing,
                                             .gradient = nothing,
                                             .exp_avg = nothing,
                                             .exp_avg_sq = nothing});
  host_executor executor(builder.build());
  executor.launch();
  EXPECT_EQ(executor.status().step, 1u);
}

TEST(StepBuilder, EmptyTensorNeedsNoScales) {
  step_builder builder;
  const tensor_view nothing = {nullptr, 0, storage_format::e4m3};
  builder.add_tensor(builder.add_group({}), {.name = "empty",
                                             .parameter = nothing,
                                             .gradient = tensor_view{nullptr, 0},
                                             .exp_avg = nothing,
                                             .exp_avg_sq = nothing});
  host_executor executor(builder.build());
  executor.launch();
  EXPECT_EQ(executor.status().step, 1u);
}

TEST(StepBuilder, UnnamedGroupsAreCalledByTheirIndex) {
  step_builder builder;
  builder.add_group({});
  builder.add_group({.name = "decayed"});
  builder.add_group({});
  const step_plan plan = builder.build();
  EXPECT_EQ(plan.groups[0].name, "group 0");
  EXPECT_EQ(plan.groups[1].name, "decayed");
  EXPECT_EQ(plan.groups[2].name, "group 2");
}

TEST(StepBuilder, InspectionNeedsNoMemoryButChecksShapes) {
  step_builder builder(plan_purpose::inspect);
  const tensor_view shape = {nullptr, 100};
  builder.add_group({});
  tensor_operands operands = {.name = "shape",
                              .parameter = shape,
                              .gradient = shape,
                              .exp_avg = shape,
                              .exp_avg_sq = shape};
  builder.add_tensor(0, operands);
  operands.name = "bent";
  operands.exp_avg.numel = 99;
  expect_error<usage_error>([&] { builder.add_tensor(0, operands); }, {"bent", "exp_avg", "99"});
  // Formats need their scales only where there is memory.
  operands.exp_avg = {nullptr, 100, storage_format::e4m3};
  operands.parameter.format = storage_format::e5m2;
  builder.add_tensor(0, operands);
  const step_plan plan = builder.build();
  EXPECT_TRUE(plan.shapes_only);
  EXPECT_EQ(plan.nodes.back().chunks, 1u);
}

}  // namespace
}  // namespace stepgraph::test
