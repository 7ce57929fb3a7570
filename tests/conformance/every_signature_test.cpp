#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "conformance/conformance.hpp"
#include "conformance/float64_check.hpp"

// The whole table of formats in one plan: a node a signature, so that a few tests cover them all.
namespace stepgraph::test {
namespace {

/// Sizes around packs, scale blocks and chunks, some off their boundary.
test_problem whole_table() {
  test_problem problem;
  problem.options = {
      .skip_non_finite = true, .max_grad_norm = 1000.0, .loss_scale = 16.0, .zero_gradients = true};
  problem.groups = {
      {.name = "decoupled", .learning_rate = 3e-3, .weight_decay = 0.1},
      {.name = "l2", .learning_rate = 1e-2, .weight_decay = 0.01, .mode = weight_decay_mode::l2},
      {.name = "maximized", .eps = 1e-6, .bias_correction = false, .maximize = true, .step = 3}};
  for (const update_signature& signature : supported_signatures()) {
    const auto add = [&](std::uint64_t numel, std::uint64_t offset) {
      const std::size_t t = problem.tensors.size();
      problem.add({"tensor " + std::to_string(t), static_cast<group_id>(t % problem.groups.size()),
                   numel, signature, all_offset_by(offset)});
    };
    for (const std::uint64_t numel : {1u, 127u, 128u, 129u, 2047u, 2048u, 5000u}) add(numel, 0);
    for (const std::uint64_t numel : {129u, 2048u}) add(numel, 1);
  }
  return problem;
}

class EverySignature : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(EverySignature, one_executor);

TEST_P(EverySignature, A08_CapturedStepsMatchFloat64) {
  const auto adapter = make(whole_table());
  EXPECT_EQ(adapter->get().plan().nodes.size(), 1 + supported_signatures().size());
  run_and_check_against_float64(*adapter, 2);
}

TEST_P(EverySignature, SkippedStepLeavesEveryByteButTheGradientsToZero) {
  test_problem problem = whole_table();
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

#if defined(STEPGRAPH_HAS_CUDA)
class EverySignatureOnGpu : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_GPU(EverySignatureOnGpu, one_executor);

TEST_P(EverySignatureOnGpu, HasTheBitsOfTheHost) {
  expect_bits_of_host(GetParam(), whole_table(), 3);
}
#endif

}  // namespace
}  // namespace stepgraph::test
