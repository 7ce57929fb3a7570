#include <gtest/gtest.h>

#include "common/warmed_up.hpp"
#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// Every option of groups and steps, against float64, over enough steps to pass schedule boundaries.
namespace stepgraph::test {
namespace {

struct option_case {
  const char* name;
  group_options group;
  step_options step;
};

std::string test_name(const option_case& tested) { return tested.name; }

schedule schedule_of(learning_rate_style style, std::uint64_t warmup) {
  return warmed_up(style, 1e-4, 1e-2, 1e-3, warmup, 9);
}

/// A weight decay that rises over ten samples or updates.
schedule rising(schedule_clock clock) {
  return schedules::megatron_weight_decay({.style = schedules::megatron_weight_decay_style::cosine,
                                           .start = 0.01,
                                           .end = 0.2,
                                           .increment = 10,
                                           .clock = clock});
}

const option_case option_cases[] = {
    {"adamw", {.weight_decay = 0.1}, {}},
    {"l2", {.weight_decay = 0.1, .mode = weight_decay_mode::l2}, {}},
    {"no_bias_correction", {.weight_decay = 0.1, .bias_correction = false}, {}},
    {"maximize", {.weight_decay = 0.1, .maximize = true}, {}},
    {"l2_maximize", {.weight_decay = 0.1, .mode = weight_decay_mode::l2, .maximize = true}, {}},
    {"zero_learning_rate", {.learning_rate = 0.0, .weight_decay = 0.1}, {}},
    {"no_momentum", {.beta1 = 0.0, .beta2 = 0.0}, {}},
    {"large_eps", {.eps = 0.01}, {}},
    {"resumed", {.weight_decay = 0.1, .step = 1000}, {}},
    {"constant_with_warmup",
     {.learning_rate_schedule = schedule_of(learning_rate_style::constant, 3)},
     {}},
    {"linear", {.learning_rate_schedule = schedule_of(learning_rate_style::linear, 0)}, {}},
    {"linear_with_warmup",
     {.weight_decay = 0.1, .learning_rate_schedule = schedule_of(learning_rate_style::linear, 3)},
     {}},
    {"cosine_with_warmup",
     {.weight_decay = 0.1, .learning_rate_schedule = schedule_of(learning_rate_style::cosine, 3)},
     {}},
    {"cosine_resumed",
     {.learning_rate_schedule = schedule_of(learning_rate_style::cosine, 3), .step = 5},
     {}},
    {"weight_decay_schedule", {.weight_decay_schedule = rising(schedule_clock::updates)}, {}},
    {"weight_decay_of_samples",
     {.mode = weight_decay_mode::l2, .weight_decay_schedule = rising(schedule_clock::samples)},
     {.samples_per_step = 3}},
    {"loss_scale", {.weight_decay = 0.1}, {.loss_scale = 1024.0}},
    {"loss_scale_of_no_power_of_two", {}, {.loss_scale = 1000.0}},
    {"clip", {.weight_decay = 0.1}, {.max_grad_norm = 0.75}},
    {"clip_that_does_not_clip", {}, {.max_grad_norm = 1e6}},
    {"clip_of_scaled_gradients", {}, {.max_grad_norm = 0.5, .loss_scale = 64.0}},
    {"skip_non_finite", {.weight_decay = 0.1}, {.skip_non_finite = true}},
    {"zero_gradients", {}, {.zero_gradients = true}},
    {"unscale_gradients", {.maximize = true}, {.loss_scale = 64.0, .unscale_gradients = true}},
    {"unscale_and_clip",
     {.weight_decay = 0.1},
     {.max_grad_norm = 0.75, .loss_scale = 1000.0, .unscale_gradients = true}},
    {"infinity_norm", {}, {.max_grad_norm = 0.5, .norm = norm_kind::infinity}},
    {"measure_norm", {}, {.measure_norm = true}},
    {"count_zeros", {}, {.count_zeros = true}},
    {"norm_group", {.norm_group = "apart"}, {.max_grad_norm = 0.75, .loss_scale = 8.0}},
    {"infinity_norm_groups",
     {.norm_group = "apart"},
     {.norm = norm_kind::infinity, .measure_norm = true, .count_zeros = true}},
    {"threshold_that_is_not_reached", {}, {.skip_above_norm = 1e6}},
    {"exchanged_totals",
     {.norm_group = "apart"},
     {.max_grad_norm = 0.75, .count_zeros = true, .exchange_totals = true}},
    {"records", {}, {.samples_per_step = 32, .record_capacity = 5}},
    {"stochastic_rounding", {.weight_decay = 0.1}, {.stochastic_rounding = true, .seed = 7}},
    {"everything",
     {.weight_decay = 0.01,
      .mode = weight_decay_mode::l2,
      .maximize = true,
      .learning_rate_schedule = schedule_of(learning_rate_style::cosine, 2)},
     {.skip_non_finite = true, .max_grad_norm = 0.5, .loss_scale = 8.0, .zero_gradients = true}},
};

auto every_option(executor_kind kind) {
  return ::testing::Combine(::testing::Values(kind), ::testing::ValuesIn(option_cases));
}

class Options : public ConformanceWith<option_case> {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Options, every_option);

TEST_P(Options, StepsMatchFloat64BesideAnotherGroup) {
  constexpr update_signature mixed = {storage_format::bf16, storage_format::f32,
                                      storage_format::f32, storage_format::f32,
                                      storage_format::f32};
  test_problem problem;
  problem.options = tested().step;
  problem.groups = {tested().group, {.name = "other", .learning_rate = 2e-2}};
  problem.add({"f32", 0, 2500, {}});
  problem.add({"mixed", 0, 300, mixed});
  problem.add({"f32 of the other group", 1, 5000, {}});
  problem.add({"mixed of the other group", 1, 7, mixed});
  using enum storage_format;
  for (const update_signature& signature : {
           update_signature{bf16, bf16, remainder, e4m3, e4m3},
           update_signature{e4m3, bf16, f32, f32, f32},
           update_signature{e5m2, f32, none, bf16, f16},
           update_signature{f16, f16, f16, f16, f16, f16},
           update_signature{bf16, f32, none, e4m3, bf16, bf16},
       }) {
    problem.add({name_of(signature), 0, 2500, signature});
  }
  for (const storage_format format : {f32, f16, bf16}) {
    problem.add({std::string("alone in ") + name_of(format), 1, 2100, gradient_alone(format)});
  }
  run_and_check_against_float64(*make(problem), 12);
  expect_bits_of_host(kind(), problem, 3);
}

}  // namespace
}  // namespace stepgraph::test
