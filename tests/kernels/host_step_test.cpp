#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/kernel_problem.hpp"
#include "stepgraph/kernels/host_loops.hpp"

// The host's operations on the step block: settings, advance, unscaling of gradients, records.
namespace stepgraph {
namespace {

using test::host_block;
using test::host_tensors;
using test::kernel_tensor;
using test::operand_set;

constexpr double infinity = std::numeric_limits<double>::infinity();

TEST(AdvanceStep, AppliesABatchOnce) {
  host_block block(2);
  const setting entries[] = {{1, setting_field::learning_rate, 0.5},
                             {whole_step, setting_field::loss_scale, 2.0}};
  test::advance_unmeasured(block, test::batch_of(entries, 7));
  EXPECT_EQ(block.groups[1].learning_rate, 0.5);
  EXPECT_EQ(block.groups[0].learning_rate, 1e-3);
  EXPECT_EQ(block.scalars.loss_scale, 2.0f);
  EXPECT_EQ(block.scalars.settings_serial, 7u);
  // A captured launch repeats its arguments; a value that came another way must survive.
  block.groups[1].learning_rate = 0.25;
  test::advance_unmeasured(block, test::batch_of(entries, 7));
  EXPECT_EQ(block.groups[1].learning_rate, 0.25);
  EXPECT_EQ(block.progress[1].step, 2u);
}

TEST(AdvanceStep, FewEntriesMayTravelInTheBatchItself) {
  const setting entries[] = {
      {0, setting_field::learning_rate, 0.5}, {1, setting_field::weight_decay, 0.25},
      {1, setting_field::beta1, 0.5},         {1, setting_field::beta2, 0.75},
      {0, setting_field::eps, 0.125},         {whole_step, setting_field::samples, 17.0}};
  static_assert(std::size(entries) == settings_batch::inline_capacity);
  host_block block(2);
  test::advance_unmeasured(block, test::inline_batch_of(entries, 1));
  host_block expected(2);
  test::advance_unmeasured(expected, test::batch_of(entries, 1));
  EXPECT_EQ(block.groups[0].learning_rate, 0.5);
  EXPECT_EQ(block.groups[1].weight_decay, 0.25);
  EXPECT_EQ(block.scalars.samples, 17u);
  EXPECT_EQ(block.terms[1].step_size, expected.terms[1].step_size);
  EXPECT_EQ(block.terms[0].eps, expected.terms[0].eps);
}

TEST(AdvanceStep, SkippedStepAppliesSettingsButAdvancesNoGroup) {
  host_block block(1);
  const setting entries[] = {{0, setting_field::eps, 0.5}};
  test::advance_by_total(block, std::numeric_limits<double>::quiet_NaN(),
                         test::batch_of(entries, 1));
  EXPECT_EQ(block.groups[0].eps, 0.5);
  EXPECT_EQ(block.progress[0].step, 0u);
  EXPECT_EQ(block.scalars.step, 0u);
  EXPECT_EQ(block.scalars.skipped, 1u);
}

TEST(AdvanceStep, LeavesTheUnscaledNormOfEveryNormGroup) {
  host_block block(1, 3);
  block.scalars.next_loss_scale.scale = 2.0f;
  const double totals[] = {36.0, infinity, 0.0};
  host::advance_step(block.view(), {}, {infinity, 0, 1}, totals);
  EXPECT_EQ(block.norms, (std::vector<double>{3.0, infinity, 0.0}));
  test::advance_unmeasured(block);
  EXPECT_EQ(block.norms, (std::vector<double>{0.0, 0.0, 0.0}));
}

TEST(ApplySettings, ChangesSettingsWithoutAStep) {
  host_block block(1);
  const setting entries[] = {{0, setting_field::beta1, 0.5}, {0, setting_field::group_step, 9.0}};
  host::apply_settings(block.view(), test::batch_of(entries, 3));
  EXPECT_EQ(block.groups[0].beta1, 0.5);
  EXPECT_EQ(block.progress[0].step, 9u);
  EXPECT_EQ(block.scalars.step, 0u);
  EXPECT_EQ(block.scalars.launches, 0u);
}

/// Gradients of every format, one of them empty.
std::vector<kernel_tensor> gradients() {
  std::vector<kernel_tensor> tensors;
  for (const storage_format gradient :
       {storage_format::f32, storage_format::f16, storage_format::bf16}) {
    for (const std::uint64_t numel : {0u, 5u, 2048u, 4099u}) {
      tensors.push_back({{storage_format::f32, gradient}, numel, 0, numel % 2});
    }
  }
  return tensors;
}

TEST(ScaleGradients, RoundsTheProductToTheFormat) {
  const std::vector<kernel_tensor> tensors = gradients();
  std::vector<operand_set> contents = test::random_contents(tensors, 51);
  const host_tensors placed(tensors, contents);
  host_block block(1);
  block.scalars.gradient_scale = 0.3f;
  host::scale_gradients(placed.host_statistics_table(), block.view());
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const storage_format format = tensors[t].signature.gradient;
    std::vector<float> values = test::decode(format, contents[t][test::gradient_operand]);
    for (float& value : values) value *= 0.3f;
    contents[t][test::gradient_operand] = test::encode(format, values);
  }
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
}

TEST(ScaleGradients, LeavesThemWhenTheStepIsSkippedAndWhenTheScaleIsOne) {
  const std::vector<kernel_tensor> tensors = gradients();
  const std::vector<operand_set> contents = test::random_contents(tensors, 52);
  const host_tensors placed(tensors, contents);
  host_block block(1);
  host::scale_gradients(placed.host_statistics_table(), block.view());
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
  block.scalars.gradient_scale = 0.5f;
  block.scalars.skip = 1;
  host::scale_gradients(placed.host_statistics_table(), block.view());
  EXPECT_EQ(placed.buffers, host_tensors(tensors, contents).buffers);
}

TEST(Records, OfALaunchLiesInItsPlaceAndSaysWhatTheStepSays) {
  constexpr std::uint32_t capacity = 3;
  constexpr std::uint32_t groups = 2;
  host_block block(groups);
  block.step.samples_per_step = 10;
  block.step.max_grad_norm = 1.0;
  std::vector<std::uint64_t> words(capacity * words_of_record(groups));
  block.records = {words.data(), capacity};
  for (std::uint64_t launch = 1; launch <= 7; ++launch) {
    const std::vector<std::uint64_t> before = words;
    test::advance_by_total(block, launch == 5 ? infinity : 4.0);
    std::vector<std::uint32_t> values;
    const std::size_t begin = (launch - 1) % capacity * words_of_record(groups);
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (i < begin || i >= begin + words_of_record(groups)) {
        EXPECT_EQ(words[i], before[i]) << "of another record";
        continue;
      }
      EXPECT_EQ(tag_of(words[i]), launch);
      values.push_back(value_of(words[i]));
    }
    step_scalars scalars;
    std::memcpy(static_cast<void*>(&scalars), values.data(), sizeof scalars);
    EXPECT_EQ(scalars.launches, launch);
    EXPECT_EQ(scalars.step + scalars.skipped, launch);
    EXPECT_EQ(scalars.samples, 10 * scalars.step);
    EXPECT_EQ(scalars.skip, launch == 5 ? 1u : 0u);
    EXPECT_EQ(scalars.found_inf, launch == 5 ? 1u : 0u);
    EXPECT_EQ(scalars.grad_norm, launch == 5 ? infinity : 2.0);
    EXPECT_EQ(scalars.clip_coefficient, block.scalars.clip_coefficient);
    std::array<group_progress, groups> progress;
    std::memcpy(static_cast<void*>(progress.data()), values.data() + scalar_words, sizeof progress);
    for (std::size_t g = 0; g < groups; ++g) {
      EXPECT_EQ(progress[g].step, block.progress[g].step);
      EXPECT_EQ(progress[g].learning_rate, block.progress[g].learning_rate);
      EXPECT_EQ(progress[g].weight_decay, block.progress[g].weight_decay);
    }
  }
}

}  // namespace
}  // namespace stepgraph
