#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "kernels/device_problem.hpp"
#include "kernels/norm_groups.hpp"

// The launchers on the step block against the host loops of the same names, bit for bit.
namespace stepgraph {
namespace {

using cuda::launch_order;
using test::check;
using test::device_block;
using test::device_buffer;
using test::device_tensors;
using test::host_block;
using test::host_tensors;
using test::kernel_tensor;
using test::operand_set;

class GpuStep : public test::launcher_test {
 protected:
  void advance(const device_block& block, const settings_batch& settings, const double* totals) {
    check(cuda::launch_advance_step(block.view(), settings, totals, block.messages(),
                                    launch_order::full, stream().get()));
  }
};

/// A batch with a value for every field of some groups and of the step.
std::vector<setting> varied_settings() {
  std::vector<setting> entries;
  for (const std::uint32_t group : {0u, 1u, 127u, 128u, 199u}) {
    const double part = 1.0 / (group + 3.0);
    entries.push_back({group, setting_field::learning_rate, part});
    entries.push_back({group, setting_field::weight_decay, part / 2.0});
    entries.push_back({group, setting_field::beta1, part / 3.0});
    entries.push_back({group, setting_field::beta2, part / 4.0});
    entries.push_back({group, setting_field::eps, part / 5.0});
    entries.push_back({group, setting_field::group_step, group * 3.0});
  }
  entries.push_back({64, setting_field::resume_learning_rate, 0.0});
  entries.push_back({65, setting_field::resume_weight_decay, 0.0});
  entries.push_back({whole_step, setting_field::loss_scale, 512.0});
  entries.push_back({whole_step, setting_field::growth_tracker, 1.0});
  entries.push_back({whole_step, setting_field::hysteresis_left, -4.0});
  entries.push_back({whole_step, setting_field::max_grad_norm, 0.25});
  entries.push_back({whole_step, setting_field::skip_above_norm, 1e9});
  entries.push_back({whole_step, setting_field::samples_per_step, 11.0});
  entries.push_back({whole_step, setting_field::step, 77.0});
  entries.push_back({whole_step, setting_field::skipped, 78.0});
  entries.push_back({whole_step, setting_field::samples, 79.0});
  return entries;
}

TEST_F(GpuStep, AdvanceGivesTheBitsOfTheHostLoop) {
  host_block block = test::varied_block();
  const device_block found(block);
  const std::vector<setting> entries = varied_settings();
  const device_buffer<setting> on_device(entries);
  const std::span<const setting> there(on_device.data(), entries.size());
  // The third batch repeats the serial of the second and is ignored.
  for (const std::uint64_t serial : {0u, 1u, 1u, 2u}) {
    test::advance_unmeasured(block, test::batch_of(entries, serial));
    advance(found, test::batch_of(there, serial), nullptr);
    test::expect_same_block(found.read(), block);
  }
}

TEST_F(GpuStep, SettingsOfEveryNumberReachEveryLauncher) {
  const std::vector<setting> all = varied_settings();
  const std::vector<kernel_tensor> tensors = {{{}, 3000, 0, 0}};
  const std::vector<operand_set> contents = test::random_contents(tensors, 53);
  const host_tensors on_host(tensors, contents);
  const device_tensors on_device(tensors, contents);
  for (std::size_t count = 1; count <= all.size(); count += count < 8 ? 1 : 16) {
    SCOPED_TRACE(count);
    // The last ones, so that whole-step settings are among the few.
    const std::vector<setting> entries(all.end() - static_cast<std::ptrdiff_t>(count), all.end());
    const bool fits = count <= settings_batch::inline_capacity;
    const device_buffer<setting> there(entries);
    const auto batch = [&](std::uint64_t serial) {
      return fits ? test::inline_batch_of(entries, serial)
                  : test::batch_of({there.data(), count}, serial);
    };
    host_block block = test::varied_block();
    const device_block found(block);
    const test::device_workspace workspace(on_host.chunks.size());
    test::measure_and_advance(block, on_host.host_statistics_table(), test::batch_of(entries, 1));
    check(cuda::launch_grad_stats(on_device.statistics_table(), {}, workspace.view(), found.view(),
                                  batch(1), launch_order::full, stream().get()));
    test::expect_same_block(found.read(), block);
    test::advance_unmeasured(block, test::batch_of(entries, 2));
    advance(found, batch(2), nullptr);
    test::expect_same_block(found.read(), block);
    host::apply_settings(block.view(), test::batch_of(entries, 3));
    check(cuda::launch_apply_settings(found.view(), batch(3), stream().get()));
    test::expect_same_block(found.read(), block);
  }
}

TEST_F(GpuStep, ApplySettingsGivesTheBitsOfTheHostLoop) {
  host_block block = test::varied_block();
  const device_block found(block);
  const std::vector<setting> entries = varied_settings();
  const device_buffer<setting> on_device(entries);
  for (const std::uint64_t serial : {0u, 5u}) {
    host::apply_settings(block.view(), test::batch_of(entries, serial));
    check(cuda::launch_apply_settings(
        found.view(), test::batch_of({on_device.data(), entries.size()}, serial), stream().get()));
    test::expect_same_block(found.read(), block);
  }
}

// Totals as other devices left them, in groups of any number and with values that are not finite.
TEST_F(GpuStep, AdvanceByTotalsGivesTheBitsOfTheHostLoop) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const norm_kind norm : {norm_kind::l2, norm_kind::infinity}) {
    for (const std::vector<double>& sums : {std::vector{25.0},
                                            {9.0, 0.0, 16.0},
                                            {1e40, 1e-50},
                                            {nan, 1.0, 2.0},
                                            {1.0, nan, 2.0},
                                            {1.0, 2.0, nan},
                                            {1.0, infinity, 2.0},
                                            {nan, infinity},
                                            std::vector(64, 0.1)}) {
      const auto norm_groups = static_cast<std::uint32_t>(sums.size());
      host_block block = test::varied_block(norm_groups);
      block.step.norm = norm;
      block.step.skip_above_norm = 1e-3;
      const device_block found(block);
      std::vector<double> totals = sums;
      totals.push_back(12345.0);
      const device_buffer<double> there(totals);
      const gradient_statistics statistics = {math::combined_total(sums.data(), norm_groups, norm),
                                              12345, 1};
      for (int step = 0; step < 3; ++step) {
        host::advance_step(block.view(), {}, statistics, sums.data());
        advance(found, {}, there.data());
        test::expect_same_block(found.read(), block);
      }
    }
  }
}

/// The block of a step whose inputs lie at `inputs`: found_inf, scale, learning rate, weight decay.
host_block block_with_inputs(const float* inputs) {
  host_block block = test::varied_block();
  block.step.found_inf_input = inputs;
  block.step.loss_scale_input = inputs + 1;
  block.step.scaling.rule = loss_scale_rule::fixed;
  for (std::size_t i = 0; i < block.groups.size(); i += 3) {
    block.groups[i].learning_rate_input = inputs + 2;
    block.groups[i].weight_decay_input = inputs + 3;
  }
  return block;
}

TEST_F(GpuStep, InputsAreReadAtEveryStep) {
  const device_buffer<float> there(4);
  std::vector<float> inputs(4);
  host_block block = block_with_inputs(inputs.data());
  const device_block found(block_with_inputs(there.data()));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float found_inf : {0.0f, 1.0f, 0.0f, 0.5f, nan, -0.0f}) {
    inputs = {found_inf, inputs[1] + 8.0f, inputs[2] + 0.125f, inputs[3] + 0.01f};
    there.write(inputs);
    test::advance_unmeasured(block);
    advance(found, {}, nullptr);
    const host_block read = found.read();
    EXPECT_TRUE(test::same_bits(std::vector{read.scalars}, std::vector{block.scalars}));
    EXPECT_TRUE(test::same_bits(read.progress, block.progress));
    EXPECT_TRUE(test::same_bits(read.terms, block.terms));
  }
  EXPECT_EQ(block.scalars.skipped, 3u);
}

TEST_F(GpuStep, ScaleGradientsGivesTheBitsOfTheHostLoop) {
  std::vector<kernel_tensor> tensors = test::gradients_in_groups(1);
  for (const float factor : {0.3f, 1.0f, 0x1p-16f, 1e-30f}) {
    for (const std::uint32_t skip : {0u, 1u}) {
      const std::vector<operand_set> contents = test::random_contents(tensors, 54);
      const host_tensors expected(tensors, contents);
      const device_tensors found(tensors, contents);
      host_block block(1);
      block.scalars.gradient_scale = factor;
      block.scalars.skip = skip;
      const device_block on_device(block);
      host::scale_gradients(expected.host_statistics_table(), block.view());
      check(cuda::launch_scale_gradients(found.statistics_table(), on_device.view(),
                                         launch_order::full, stream().get()));
      EXPECT_EQ(found.read(), expected.buffers) << factor << (skip != 0 ? ", skipped" : "");
    }
  }
}

TEST_F(GpuStep, ScaleGradientsPassesOverFillers) {
  const std::vector<kernel_tensor> tensors = {{{}, 5000, 0, 0}, {{}, 2048, 0, 0}};
  const std::vector<operand_set> contents = test::random_contents(tensors, 55);
  const host_tensors expected(tensors, contents);
  const device_tensors found(tensors, contents);
  std::vector<chunk_descriptor> chunks = expected.chunks;
  chunks.insert(chunks.begin() + 2, 3, {no_tensor, 0});
  const device_buffer<chunk_descriptor> there(chunks);
  host_block block(1);
  block.scalars.gradient_scale = 0.7f;
  const device_block on_device(block);
  host::scale_gradients({expected.descriptors.data(), chunks.data(), chunks.size()}, block.view());
  check(cuda::launch_scale_gradients({found.descriptors(), there.data(), there.size()},
                                     on_device.view(), launch_order::full, stream().get()));
  EXPECT_EQ(found.read(), expected.buffers);
}

// From either launcher that advances the step.
TEST_F(GpuStep, RecordsAreThoseOfTheHostLoop) {
  // Fewer places than launches.
  constexpr std::uint32_t capacity = 5;
  const std::vector<kernel_tensor> tensors = {{{}, 3000, 0, 0}};
  const std::vector<operand_set> contents = test::random_contents(tensors, 56);
  const host_tensors on_host(tensors, contents);
  const device_tensors on_device(tensors, contents);
  const test::device_workspace workspace(on_host.chunks.size());
  host_block block = test::varied_block();
  std::vector<std::uint64_t> records(
      capacity * words_of_record(static_cast<std::uint32_t>(block.groups.size())));
  const device_buffer<std::uint64_t> records_there(records);
  const device_block found(block, {records_there.data(), capacity});
  block.records = {records.data(), capacity};
  const device_buffer<double> infinite(std::vector{std::numeric_limits<double>::infinity(), 0.0});
  for (int launch = 0; launch < 13; ++launch) {
    if (launch % 4 == 2) {
      test::advance_by_total(block, std::numeric_limits<double>::infinity());
      advance(found, {}, infinite.data());
    } else {
      test::measure_and_advance(block, on_host.host_statistics_table());
      check(cuda::launch_grad_stats(on_device.statistics_table(), {}, workspace.view(),
                                    found.view(), {}, launch_order::full, stream().get()));
    }
    EXPECT_TRUE(test::same_bits(records_there.read(), records)) << launch;
  }
}

}  // namespace
}  // namespace stepgraph
