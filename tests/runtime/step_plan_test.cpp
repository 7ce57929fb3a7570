#include "stepgraph/step_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "stepgraph/kernels/launch_shape.hpp"
#include "stepgraph/step_builder.hpp"

namespace stepgraph::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr storage_format f32 = storage_format::f32;
constexpr storage_format bf16 = storage_format::bf16;
constexpr storage_format none = storage_format::none;

/// A plan of shapes: each tensor by its element count and formats.
struct shape {
  std::uint64_t numel;
  update_signature signature;
  group_id group = 0;
};

step_plan plan_of(const std::vector<shape>& shapes, const step_options& options = {},
                  std::size_t groups = 1) {
  step_builder builder(plan_purpose::inspect);
  builder.set_options(options);
  for (std::size_t g = 0; g < groups; ++g) builder.add_group({});
  for (std::size_t t = 0; t < shapes.size(); ++t) {
    const auto& [numel, signature, group] = shapes[t];
    tensor_operands operands = {.name = "tensor " + std::to_string(t),
                                .parameter = {nullptr, numel, signature.parameter},
                                .gradient = tensor_view{nullptr, numel, signature.gradient},
                                .exp_avg = {nullptr, numel, signature.exp_avg},
                                .exp_avg_sq = {nullptr, numel, signature.exp_avg_sq}};
    if (signature.master != none) operands.master = tensor_view{nullptr, numel, signature.master};
    if (signature.max_exp_avg_sq != none) {
      operands.max_exp_avg_sq = tensor_view{nullptr, numel, signature.max_exp_avg_sq};
    }
    builder.add_tensor(group, operands);
  }
  return builder.build();
}

constexpr update_signature plain = {f32, f32, none, f32, f32};
constexpr update_signature mixed = {bf16, bf16, f32, f32, f32};

TEST(StepPlan, WithoutMeasuringThereIsAnAdvanceStepAndOneUpdateASignature) {
  const step_plan plan = plan_of({{10, plain}, {20, mixed}, {30, plain, 1}}, {}, 2);
  ASSERT_EQ(plan.nodes.size(), 3u);
  EXPECT_EQ(plan.nodes[0].name, "advance_step");
  EXPECT_EQ(plan.nodes[0].kind, node_kind::advance_step);
  EXPECT_EQ(plan.nodes[1].name, "update/f32/f32/none/f32/f32");
  EXPECT_THAT(plan.nodes[1].tensors, ElementsAre(0, 2));
  EXPECT_EQ(plan.nodes[2].name, "update/bf16/bf16/f32/f32/f32");
  EXPECT_THAT(plan.nodes[2].tensors, ElementsAre(1));
  EXPECT_EQ(plan.parameter_count(), 60u);
}

TEST(StepPlan, SkippingOrClippingMeasuresTheGradient) {
  for (const step_options& options :
       {step_options{.skip_non_finite = true}, step_options{.max_grad_norm = 1.0}}) {
    const step_plan plan = plan_of({{10, plain}, {20, mixed}}, options);
    ASSERT_EQ(plan.nodes.size(), 3u);
    EXPECT_EQ(plan.nodes[0].name, "grad_stats");
    EXPECT_EQ(plan.nodes[0].bytes_read, 10u * 4 + 20u * 2);
    EXPECT_EQ(plan.nodes[0].bytes_written, 0u);
    EXPECT_EQ(plan.nodes[0].tensors.size(), 2u);
  }
}

TEST(StepPlan, NodesRunInOrder) {
  const step_plan plan = plan_of({{10, plain}, {20, mixed}}, {.skip_non_finite = true});
  ASSERT_EQ(plan.edges.size(), 2u);
  for (std::uint32_t i = 0; i < plan.edges.size(); ++i) {
    EXPECT_EQ(plan.edges[i].from, i);
    EXPECT_EQ(plan.edges[i].to, i + 1);
  }
}

TEST(StepPlan, BytesCountEveryOperandOnce) {
  const step_plan plan = plan_of({{1000, plain}});
  EXPECT_EQ(plan.bytes_read(), 1000u * 16);
  EXPECT_EQ(plan.bytes_written(), 1000u * 12);
  const step_plan zeroing = plan_of({{1000, plain}}, {.zero_gradients = true});
  EXPECT_EQ(zeroing.bytes_written(), 1000u * 16);
  // With a master the stored parameter is only written.
  const step_plan with_master = plan_of({{1000, mixed}});
  EXPECT_EQ(with_master.bytes_read(), 1000u * (2 + 12));
  EXPECT_EQ(with_master.bytes_written(), 1000u * (2 + 12));
}

TEST(StepPlan, BytesCountBlockScalesAndTheReadHalfOfAMaster) {
  using enum storage_format;
  // One scale byte for every 128 elements, the last block not full.
  const step_plan scaled = plan_of({{1000, {bf16, bf16, remainder, e4m3, f16, f16}}});
  EXPECT_EQ(scaled.bytes_read(), 1000u * (2 + 2 + 2 + 1 + 2 + 2) + 3 * 8);
  EXPECT_EQ(scaled.bytes_written(), 1000u * (2 + 2 + 1 + 2 + 2) + 3 * 8);
}

TEST(StepPlan, AmsgradIsASignatureOfItsOwn) {
  const step_plan plan = plan_of({{10, plain}, {10, {f32, f32, none, f32, f32, f32}}});
  ASSERT_EQ(plan.nodes.size(), 3u);
  EXPECT_EQ(plan.nodes[2].name, "update/f32/f32/none/f32/f32/amsgrad");
}

TEST(StepPlan, UpdateHasTheBlocksOfItsChunks) {
  const step_plan plan =
      plan_of({{1, plain}, {0, plain}, {2048, plain}, {2049, plain}}, {.skip_non_finite = true});
  ASSERT_EQ(plan.nodes.size(), 2u);
  EXPECT_EQ(plan.nodes[1].chunks, 4u);
  EXPECT_EQ(plan.nodes[1].blocks, 4u * update_blocks_per_chunk);
  EXPECT_EQ(plan.nodes[1].threads, update_threads);
  EXPECT_THAT(plan.nodes[1].tensors, ElementsAre(0, 2, 3));
  EXPECT_EQ(plan.nodes[0].blocks, statistics_blocks(4) + prepare_blocks(1));
  EXPECT_EQ(plan.nodes[0].threads, statistics_threads);
}

TEST(StepPlan, A16_NodesDoNotDependOnTheNumberOfGroups) {
  std::vector<shape> shapes;
  for (group_id group = 0; group < 465; ++group) shapes.push_back({3, plain, group});
  EXPECT_EQ(plan_of(shapes, {}, 465).nodes.size(), plan_of({{3, plain}}).nodes.size());
}

TEST(StepPlan, OfNothingStillAdvancesTheStep) {
  const step_plan plan = plan_of({});
  ASSERT_EQ(plan.nodes.size(), 1u);
  EXPECT_EQ(plan.nodes[0].kind, node_kind::advance_step);
  EXPECT_EQ(plan.nodes[0].blocks, 1u);
  EXPECT_TRUE(plan.edges.empty());
}

TEST(StepPlan, TensorsBeyond32BitsKeepTheirSizes) {
  const std::uint64_t numel = (1ull << 32) + 1;
  const step_plan plan = plan_of({{numel, mixed}});
  EXPECT_EQ(plan.nodes[1].chunks, (1ull << 21) + 1);
  EXPECT_EQ(plan.nodes[1].bytes_read, numel * 14);
}

TEST(StepPlan, DotNamesEveryNodeWithItsLaunchAndEveryEdge) {
  const std::string dot = to_dot(plan_of({{5000, plain}, {20, mixed}}, {.skip_non_finite = true}));
  EXPECT_THAT(dot, HasSubstr("digraph"));
  EXPECT_THAT(dot, HasSubstr("grad_stats"));
  EXPECT_THAT(dot, HasSubstr("update/f32/f32/none/f32/f32"));
  EXPECT_THAT(dot, HasSubstr("update/bf16/bf16/f32/f32/f32"));
  EXPECT_THAT(dot, HasSubstr(std::to_string(3 * update_blocks_per_chunk) + " blocks x " +
                             std::to_string(update_threads) + " threads"));
  EXPECT_THAT(dot, HasSubstr("read 80000 B"));
  EXPECT_THAT(dot, HasSubstr("write 60000 B"));
  EXPECT_THAT(dot, HasSubstr("n0 -> n1"));
  EXPECT_THAT(dot, HasSubstr("n1 -> n2"));
  EXPECT_THAT(dot, HasSubstr("programmatic"));
}

}  // namespace
}  // namespace stepgraph::test
