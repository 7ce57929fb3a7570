#pragma once

#include <optional>
#include <vector>

#include "common/cuda_testing.hpp"
#include "common/same_bits.hpp"
#include "kernels/kernel_problem.hpp"
#include "stepgraph/kernels/cuda_launch.hpp"

/// Inputs of single operations in device memory. Buffers have exactly the size of their operand, so
/// that memcheck sees every access beside it.
namespace stepgraph::test {

class device_tensors {
 public:
  device_tensors(const std::vector<kernel_tensor>& tensors,
                 const std::vector<operand_set>& contents)
      : placed_(tensors, contents),
        descriptors_(placed_.descriptors),
        chunks_(placed_.chunks),
        arrivals_(std::vector<std::uint32_t>(tensors.size(), 0)) {}

  tensor_table_view table() const {
    return {descriptors_.data(), chunks_.data(), chunks_.size(), arrivals_.data()};
  }
  /// For a pass over the gradients, all of one norm group.
  statistics_table_view statistics_table() const {
    return {descriptors_.data(), chunks_.data(), chunks_.size()};
  }
  const tensor_descriptor* descriptors() const { return descriptors_.data(); }
  std::vector<operand_bytes> read() const {
    std::vector<operand_bytes> contents;
    for (const device_buffer<std::byte>& buffer : placed_.buffers) {
      contents.push_back(buffer.read());
    }
    return contents;
  }

 private:
  placed_tensors<device_buffer<std::byte>> placed_;
  device_buffer<tensor_descriptor> descriptors_;
  device_buffer<chunk_descriptor> chunks_;
  device_buffer<std::uint32_t> arrivals_;
};

/// A copy of a step block in device memory.
class device_block {
 public:
  /// Records, if there are any, go to `records`, which the device must see.
  explicit device_block(const host_block& block, const record_ring_view& records = {})
      : scalars_(std::vector{block.scalars}),
        step_(std::vector{block.step}),
        groups_(block.groups),
        progress_(block.progress),
        terms_(block.terms),
        prepared_groups_(block.groups.size()),
        norms_(block.norms),
        segments_(block.segments),
        schedule_table_(block.schedule_table),
        records_(records),
        messages_(std::vector<cuda::block_message>(
            prepare_blocks(static_cast<std::uint32_t>(block.groups.size())))) {}

  step_block_view view() const {
    step_block_view view;
    view.scalars = scalars_.data();
    view.step = step_.data();
    view.groups = groups_.data();
    view.progress = progress_.data();
    view.schedules = {segments_.data(), schedule_table_.data()};
    view.terms = terms_.data();
    view.prepared_groups = prepared_groups_.data();
    view.norms = norms_.data();
    view.records = records_;
    view.group_count = static_cast<std::uint32_t>(groups_.size());
    view.norm_group_count = static_cast<std::uint32_t>(norms_.size());
    return view;
  }
  /// For launches that only advance this block. Messages carry the number of the launch, so they
  /// cannot be shared by blocks that count apart.
  cuda::block_message* messages() const { return messages_.data(); }
  /// What later kernels read: not what passes between the halves of the advance.
  host_block read() const {
    host_block block(groups_.size(), norms_.size());
    block.scalars = scalars_.read()[0];
    block.step = step_.read()[0];
    block.groups = groups_.read();
    block.progress = progress_.read();
    block.terms = terms_.read();
    block.norms = norms_.read();
    return block;
  }

 private:
  device_buffer<step_scalars> scalars_;
  device_buffer<step_settings> step_;
  device_buffer<group_settings> groups_;
  device_buffer<group_progress> progress_;
  device_buffer<math::adam_terms> terms_;
  device_buffer<math::prepared_group> prepared_groups_;
  device_buffer<double> norms_;
  device_buffer<schedule_segment> segments_;
  device_buffer<double> schedule_table_;
  record_ring_view records_;
  device_buffer<cuda::block_message> messages_;
};

/// The messages of the launches of one step block; never of two.
class device_workspace {
 public:
  explicit device_workspace(std::uint64_t chunks, std::uint32_t groups = 1024)
      : messages_(
            std::vector<cuda::block_message>(statistics_blocks(chunks) + prepare_blocks(groups))) {}

  cuda::block_message* view() const { return messages_.data(); }

 private:
  device_buffer<cuda::block_message> messages_;
};

inline void expect_same_block(const host_block& found, const host_block& expected) {
  EXPECT_TRUE(same_bits(std::vector{found.scalars}, std::vector{expected.scalars}))
      << "norm " << found.scalars.grad_norm << ", expected " << expected.scalars.grad_norm
      << "; zeros " << found.scalars.zeros << ", expected " << expected.scalars.zeros;
  EXPECT_TRUE(same_bits(std::vector{found.step}, std::vector{expected.step}));
  EXPECT_TRUE(same_bits(found.groups, expected.groups));
  EXPECT_TRUE(same_bits(found.progress, expected.progress));
  EXPECT_TRUE(same_bits(found.terms, expected.terms));
  EXPECT_TRUE(same_bits(found.norms, expected.norms));
}

/// One schedule of each kind after the other: none, a rise and a cosine, a wave, a table, a power,
/// milestones. Appends them to a block; returns where each lies.
inline std::vector<schedule_reference> add_schedules(host_block& block) {
  block.schedule_table = {1e-3, 5e-4, 2e-4, 1e-4, 3.0, 900.0};
  block.segments = {{.curve = schedule_curve::linear, .from = 1e-6, .to = 1e-3, .length = 7.0},
                    {.curve = schedule_curve::anneal_cosine,
                     .begin = 7,
                     .from = 1e-3,
                     .to = 1e-5,
                     .length = 20'000.0},
                    {.curve = schedule_curve::cosine_wave, .period = 37, .from = 1e-3, .to = 1e-4},
                    {.curve = schedule_curve::table, .table_count = 4},
                    {.curve = schedule_curve::anneal_polynomial,
                     .from = 1e-3,
                     .to = 1e-5,
                     .length = 3e4,
                     .ratio = 0.7},
                    {.curve = schedule_curve::milestone_decay,
                     .table_count = 2,
                     .table_offset = 4,
                     .from = 1e-3,
                     .ratio = 0.1}};
  return {{},
          {.count = 2},
          {.first = 2, .count = 1},
          {.first = 3, .count = 1},
          {.first = 4, .count = 1},
          {.first = 5, .count = 1}};
}

/// Groups of every schedule, mode and correction; clipping; a loss scale that moves.
inline host_block varied_block(std::size_t norm_groups = 1) {
  host_block block(200, norm_groups);
  const std::vector<schedule_reference> schedules = add_schedules(block);
  for (std::size_t i = 0; i < block.groups.size(); ++i) {
    group_settings& group = block.groups[i];
    group.beta1 = 0.8 + 0.0009 * static_cast<double>(i);
    group.beta2 = 0.99 + 0.00004 * static_cast<double>(i);
    group.flags = static_cast<std::uint32_t>(i % 8);
    group.learning_rate_schedule = schedules[i % schedules.size()];
    group.weight_decay_schedule = schedules[i / 3 % schedules.size()];
    group.learning_rate_schedule.counts_samples = i % 4 == 3 ? 1 : 0;
    block.progress[i].step = i * i;
  }
  block.scalars.next_loss_scale.scale = 1024.0f;
  block.step.max_grad_norm = 0.5;
  block.step.samples_per_step = 3;
  block.step.scaling.rule = loss_scale_rule::torch_amp;
  block.step.scaling.growth_interval = 2;
  return block;
}

/// Base of the suites of launchers.
class launcher_test : public gpu_test {
 protected:
  cuda_stream& stream() {
    if (!stream_) stream_.emplace();
    return *stream_;
  }

 private:
  std::optional<cuda_stream> stream_;
};

}  // namespace stepgraph::test
