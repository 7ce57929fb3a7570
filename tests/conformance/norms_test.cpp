#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "conformance/conformance.hpp"

// The norm of the gradient: of all tensors, of norm groups, huge, zero, infinite; clipping by it.
namespace stepgraph::test {
namespace {

class Norms : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Norms, one_executor);

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// Gradients (3, 0) in one norm group and (0, 4) in another, of two elements each.
test_problem two_norm_groups(const step_options& options) {
  test_problem problem;
  problem.options = options;
  problem.groups = {{.name = "first", .norm_group = "dense"},
                    {.name = "second", .norm_group = "experts"}};
  problem.add_uniform("first", 0, 2, {}, 1.0f, 0.0f);
  problem.add_uniform("second", 1, 2, {}, 1.0f, 0.0f);
  return problem;
}

void write_gradients(executor_adapter& adapter, const std::vector<float>& first,
                     const std::vector<float>& second) {
  adapter.write_gradient(0, first);
  adapter.write_gradient(1, second);
}

void expect_finite_parameters(executor_adapter& adapter) {
  for (std::size_t t = 0; t < adapter.problem().tensors.size(); ++t) {
    for (const float value : adapter.values(t, parameter_operand)) {
      EXPECT_TRUE(std::isfinite(value));
    }
  }
}

TEST_P(Norms, A06_GroupsHaveTheirOwnNormsAndTheGlobalOneJoinsThem) {
  const auto adapter = make(two_norm_groups({.max_grad_norm = 1.0, .count_zeros = true}));
  write_gradients(*adapter, {3.0f, 0.0f}, {0.0f, 4.0f});
  adapter->launch();
  const step_status status = adapter->get().status();
  EXPECT_EQ(status.grad_norm, 5.0);
  EXPECT_EQ(status.norms, (std::vector<double>{3.0, 4.0}));
  EXPECT_EQ(status.zeros, 2u);
  EXPECT_EQ(status.clip_coefficient, static_cast<double>(static_cast<float>(1.0 / (5.0 + 1e-6))));
}

TEST_P(Norms, A06_OneGroupOfZerosAloneIsNoObstacle) {
  const auto adapter = make(two_norm_groups({.max_grad_norm = 10.0, .count_zeros = true}));
  write_gradients(*adapter, {0.0f, -0.0f}, {0.0f, 4.0f});
  adapter->launch();
  const step_status status = adapter->get().status();
  EXPECT_EQ(status.grad_norm, 4.0);
  EXPECT_EQ(status.norms, (std::vector<double>{0.0, 4.0}));
  EXPECT_EQ(status.zeros, 3u);
  EXPECT_EQ(status.clip_coefficient, 1.0);
  expect_finite_parameters(*adapter);
}

TEST_P(Norms, A06_ZerosEverywhereClipToOneWithoutNaN) {
  for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
    const auto adapter =
        make(two_norm_groups({.max_grad_norm = 1.0, .norm = norm, .count_zeros = true}));
    adapter->launch(2);
    const step_status status = adapter->get().status();
    EXPECT_EQ(status.grad_norm, 0.0);
    EXPECT_EQ(status.norms, (std::vector<double>{0.0, 0.0}));
    EXPECT_EQ(status.zeros, 4u);
    EXPECT_EQ(status.clip_coefficient, 1.0);
    EXPECT_FALSE(status.last_skipped);
    EXPECT_EQ(adapter->values(0, parameter_operand), (std::vector<float>{1.0f, 1.0f}));
  }
}

TEST_P(Norms, InfinityNormIsTheLargestMagnitudeOfAnyGroup) {
  const auto adapter =
      make(two_norm_groups({.max_grad_norm = 2.0, .norm = norm_kind::infinity, .loss_scale = 2.0}));
  write_gradients(*adapter, {3.0f, -16.0f}, {1.0f, 4.0f});
  adapter->launch();
  const step_status status = adapter->get().status();
  EXPECT_EQ(status.grad_norm, 8.0);
  EXPECT_EQ(status.norms, (std::vector<double>{8.0, 2.0}));
  EXPECT_NEAR(status.clip_coefficient, 0.25, 1e-6);
}

TEST_P(Norms, OneElementThatIsNotFiniteIsFoundInAnyGroupByAnyNorm) {
  for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
    for (const float bad : {infinity, -infinity, nan}) {
      for (const std::size_t tensor : {0u, 1u}) {
        const auto adapter = make(two_norm_groups({.skip_non_finite = true, .norm = norm}));
        write_gradients(*adapter, {1.0f, 2.0f}, {3.0f, 4.0f});
        adapter->write_gradient(tensor, std::vector{1.0f, bad});
        const std::vector<operand_set> before = adapter->read_all();
        adapter->launch();
        const step_status status = adapter->get().status();
        EXPECT_TRUE(status.last_skipped);
        EXPECT_TRUE(status.found_inf);
        EXPECT_EQ(status.grad_norm, infinity);
        EXPECT_EQ(status.norms[tensor], infinity);
        EXPECT_TRUE(std::isfinite(status.norms[1 - tensor]));
        expect_same_bits(adapter->problem(), adapter->read_all(), before);
      }
    }
  }
}

/// 100 gradients of 1e20 and a maximum norm of one; what is left of them is seen in the gradients.
test_problem huge_gradients() {
  test_problem problem;
  problem.groups = {{.name = "group", .learning_rate = 0.1, .eps = 1.0}};
  problem.options = {.skip_non_finite = true, .max_grad_norm = 1.0, .unscale_gradients = true};
  for (int t = 0; t < 100; ++t) {
    problem.add_uniform("tensor " + std::to_string(t), 0, 1, {}, 1.0f, 1e20f);
  }
  return problem;
}

TEST_P(Norms, A21_NormOfHugeGradientsIsFiniteAndEachIsClipped) {
  const auto adapter = make(huge_gradients());
  adapter->launch();
  EXPECT_NEAR(adapter->get().status().grad_norm / 1e21, 1.0, 1e-7);
  for (const std::size_t t : {0u, 50u, 99u}) {
    EXPECT_NEAR(adapter->values(t, gradient_operand)[0], 0.1, 1e-8);
    // A tenth of it enters the first moment.
    EXPECT_NEAR(adapter->values(t, exp_avg_operand)[0], 0.01, 1e-9);
  }
}

TEST_P(Norms, A21_NormHasOneBitPatternOnEveryReplay) {
  test_problem problem = huge_gradients();
  problem.options.unscale_gradients = false;
  problem.add({"beside them", 0, 300'000, {}});
  const auto adapter = make(problem);
  adapter->launch();
  const double norm = adapter->get().status().grad_norm;
  for (int replay = 0; replay < 100; ++replay) {
    adapter->launch();
    const double again = adapter->get().status().grad_norm;
    ASSERT_EQ(std::memcmp(&again, &norm, sizeof(norm)), 0) << replay;
  }
}

TEST_P(Norms, A21_OneInfiniteGradientAmongHugeOnesSkips) {
  const auto adapter = make(huge_gradients());
  adapter->write_gradient(7, std::vector{infinity});
  const std::vector<operand_set> before = adapter->read_all();
  adapter->launch();
  EXPECT_TRUE(adapter->get().status().last_skipped);
  expect_same_bits(adapter->problem(), adapter->read_all(), before);
}

/// Long lists in groups of very different sizes: groups that are filled up to whole blocks.
TEST_P(Norms, LongListsInUnevenGroupsHaveTheBitsOfTheHost) {
  for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
    test_problem problem;
    problem.options = {.max_grad_norm = 0.5, .norm = norm, .count_zeros = true};
    problem.groups = {{.name = "a", .norm_group = "small"},
                      {.name = "b", .norm_group = "empty"},
                      {.name = "c"},
                      {.name = "d", .norm_group = "small"}};
    problem.add({"one element", 0, 1, {}});
    problem.add({"bf16", 3, 5000, {storage_format::bf16, storage_format::bf16}});
    problem.add(
        {"f16, off by one", 2, 3001, {storage_format::f32, storage_format::f16}, all_offset_by(1)});
    // More chunks than a block of grad_stats takes alone.
    problem.add({"long", 2, 4200 * 2048 + 5, gradient_alone(storage_format::bf16)});
    problem.add({"empty", 1, 0, {}});
    expect_bits_of_host(GetParam(), problem, 2);
  }
}

TEST_P(Norms, ManyNormGroupsHaveTheBitsOfTheHost) {
  test_problem problem;
  problem.options = {.max_grad_norm = 0.5, .count_zeros = true, .record_capacity = 4};
  problem.groups.clear();
  for (group_id g = 0; g < 64; ++g) {
    problem.groups.push_back(
        {.name = std::to_string(g), .norm_group = "norm " + std::to_string(g)});
    problem.add({"tensor " + std::to_string(g), g, g * 97 % 5000, {}, all_offset_by(g % 2)});
  }
  expect_bits_of_host(GetParam(), problem, 3);
  problem.options.exchange_totals = true;
  expect_bits_of_host(GetParam(), problem, 3);
}

// Nothing happens to the totals between the nodes here, so both plans make the same step.
TEST_P(Norms, ExchangedTotalsThatNobodyChangesAreTheStepsOwn) {
  test_problem problem = two_norm_groups({.max_grad_norm = 0.5, .count_zeros = true});
  problem.add({"more", 1, 10'000, {}});
  const auto together = make(problem);
  problem.options.exchange_totals = true;
  const auto apart = make(problem);
  together->run_with_fresh_gradients(3);
  apart->run_with_fresh_gradients(3);
  expect_same_bits(problem, apart->read_all(), together->read_all());
  expect_same_status(apart->get().status(), together->get().status());
}

}  // namespace
}  // namespace stepgraph::test
