#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// The whole table of formats: a node a signature, many signatures a plan.
namespace stepgraph::test {
namespace {

/// The signatures of one parameter and one gradient format: a part of the table for each test, so
/// that several processes can share the work.
struct table_part {
  storage_format parameter;
  storage_format gradient;

  bool holds(const update_signature& signature) const {
    return signature.parameter == parameter && signature.gradient == gradient;
  }
};

std::string test_name(const table_part& part) {
  return std::string(name_of(part.parameter)) + "_" + name_of(part.gradient);
}

std::vector<table_part> table_parts() {
  using enum storage_format;
  std::vector<table_part> parts;
  for (const storage_format parameter : {f32, f16, bf16, e4m3, e5m2}) {
    for (const storage_format gradient : {f32, f16, bf16}) parts.push_back({parameter, gradient});
  }
  return parts;
}

test_problem empty_problem() {
  test_problem problem;
  problem.options = {
      .skip_non_finite = true, .max_grad_norm = 1000.0, .loss_scale = 16.0, .zero_gradients = true};
  problem.groups = {
      {.name = "decoupled", .learning_rate = 3e-3, .weight_decay = 0.1},
      {.name = "l2", .learning_rate = 1e-2, .weight_decay = 0.01, .mode = weight_decay_mode::l2},
      {.name = "maximized", .eps = 1e-6, .bias_correction = false, .maximize = true, .step = 3}};
  return problem;
}

void add(test_problem& problem, const update_signature& signature, std::uint64_t numel,
         std::uint64_t offset) {
  const std::size_t t = problem.tensors.size();
  problem.add({"tensor " + std::to_string(t), static_cast<group_id>(t % problem.groups.size()),
               numel, signature, all_offset_by(offset)});
}

/// Sizes around packs, scale blocks and chunks, some off their boundary.
test_problem problem_of(const table_part& part) {
  test_problem problem = empty_problem();
  for (const update_signature& signature : supported_signatures()) {
    if (!part.holds(signature)) continue;
    for (const std::uint64_t numel : {1u, 127u, 128u, 129u, 2047u, 2048u, 5000u}) {
      add(problem, signature, numel, 0);
    }
    for (const std::uint64_t numel : {129u, 2048u}) add(problem, signature, numel, 1);
  }
  return problem;
}

class EverySignature : public ConformanceWith<table_part> {};

auto every_part(executor_kind kind) {
  return ::testing::Combine(::testing::Values(kind), ::testing::ValuesIn(table_parts()));
}

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(EverySignature, every_part);

TEST_P(EverySignature, A08_CapturedStepsMatchFloat64) {
  const auto adapter = make(problem_of(tested()));
  run_and_check_against_float64(*adapter, 2);
}

TEST_P(EverySignature, SkippedStepLeavesEveryByteButTheGradientsToZero) {
  const test_problem problem = problem_of(tested());
  const auto adapter = make(problem);
  const float infinity = std::numeric_limits<float>::infinity();
  const std::size_t last = problem.tensors.size() - 1;
  adapter->write(last, gradient_operand,
                 encode(problem.tensors[last].signature.gradient, std::span(&infinity, 1)));
  adapter->launch();
  std::vector<operand_set> expected = problem.contents;
  for (operand_set& operands : expected) {
    std::fill(operands[gradient_operand].begin(), operands[gradient_operand].end(), std::byte{0});
  }
  expect_same_bits(problem, adapter->read_all(), expected);
  EXPECT_EQ(adapter->get().status().skipped, 1u);
}

class WholeTable : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(WholeTable, one_executor);

TEST_P(WholeTable, IsOnePlanWithANodeForEachSignature) {
  test_problem problem = empty_problem();
  for (const update_signature& signature : supported_signatures()) add(problem, signature, 129, 0);
  std::size_t in_parts = 0;
  for (const table_part& part : table_parts()) {
    for (const update_signature& signature : supported_signatures()) {
      if (part.holds(signature)) ++in_parts;
    }
  }
  EXPECT_EQ(in_parts, supported_signatures().size()) << "the other tests leave signatures out";
  const auto adapter = make(problem);
  EXPECT_EQ(adapter->get().plan().nodes.size(), 1 + supported_signatures().size());
  adapter->launch();
  // The step goes on from that of the group that has come furthest.
  EXPECT_EQ(adapter->get().status().step, 4u);
}

#if defined(STEPGRAPH_HAS_CUDA)
class EverySignatureOnGpu : public ConformanceWith<table_part> {};

STEPGRAPH_INSTANTIATE_FOR_GPU(EverySignatureOnGpu, every_part);

TEST_P(EverySignatureOnGpu, HasTheBitsOfTheHost) {
  expect_bits_of_host(kind(), problem_of(tested()), 3);
}
#endif

}  // namespace
}  // namespace stepgraph::test
