#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "common/random_operands.hpp"
#include "stepgraph/kernels/host_loops.hpp"
#include "stepgraph/kernels/step_block.hpp"
#include "stepgraph/kernels/tensor_table.hpp"
#include "stepgraph/math/advance_step.hpp"

/// Inputs of single operations: tables over memory of one kind, and step blocks on the host.
namespace stepgraph::test {

struct kernel_tensor {
  update_signature signature;
  std::uint64_t numel = 0;
  std::uint32_t group = 0;
  std::uint64_t offset = 0;  ///< elements by which all memory is off a 16-byte boundary
};

/// The contents of every tensor's operands, from one seed.
inline std::vector<operand_set> random_contents(const std::vector<kernel_tensor>& tensors,
                                                std::uint64_t seed) {
  integer_generator random(seed);
  std::vector<operand_set> contents;
  for (const kernel_tensor& tensor : tensors) {
    contents.push_back(random_operands(tensor.signature, tensor.numel, random));
  }
  return contents;
}

/// Memory of one operand: `Buffer` is constructed from bytes and has data().
template <class Buffer>
struct placed_tensors {
  std::vector<Buffer> buffers;
  std::vector<tensor_descriptor> descriptors;
  std::vector<chunk_descriptor> chunks;

  placed_tensors(const std::vector<kernel_tensor>& tensors,
                 const std::vector<operand_set>& contents) {
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      tensor_descriptor descriptor;
      descriptor.numel = tensors[t].numel;
      descriptor.group = tensors[t].group;
      descriptor.signature = tensors[t].signature;
      std::array<std::byte*, operand_count> placed;
      for (std::size_t operand = 0; operand < operand_count; ++operand) {
        const std::size_t skipped = tensors[t].offset * stored_size(tensors[t].signature, operand);
        operand_bytes bytes(skipped);
        bytes.insert(bytes.end(), contents[t][operand].begin(), contents[t][operand].end());
        const bool exists = stored_size(tensors[t].signature, operand) != 0;
        buffers.emplace_back(bytes);
        placed[operand] =
            exists ? reinterpret_cast<std::byte*>(buffers.back().data()) + skipped : nullptr;
      }
      const auto scales = [&](std::size_t operand) {
        return reinterpret_cast<std::uint8_t*>(placed[scales_of(operand)]);
      };
      descriptor.parameter = placed[parameter_operand];
      descriptor.gradient = placed[gradient_operand];
      descriptor.master = placed[master_operand];
      descriptor.exp_avg = placed[exp_avg_operand];
      descriptor.exp_avg_sq = placed[exp_avg_sq_operand];
      descriptor.max_exp_avg_sq = placed[max_exp_avg_sq_operand];
      descriptor.master_scales = scales(master_operand);
      descriptor.exp_avg_scales = scales(exp_avg_operand);
      descriptor.exp_avg_sq_scales = scales(exp_avg_sq_operand);
      descriptor.max_exp_avg_sq_scales = scales(max_exp_avg_sq_operand);
      auto* const scaling = reinterpret_cast<float*>(placed[parameter_scaling_operand]);
      if (is_fp8(descriptor.signature.parameter)) {
        descriptor.parameter_scaling = {scaling, scaling + 1, scaling + 2};
      }
      descriptor.vectorizable = all_operands_aligned(descriptor) ? 1 : 0;
      append_chunks(chunks, static_cast<std::uint32_t>(descriptors.size()), descriptor.numel);
      descriptors.push_back(descriptor);
    }
  }

  /// A view of host tables, whatever memory the operands are in.
  tensor_table_view host_table() const {
    return {descriptors.data(), chunks.data(), chunks.size(), nullptr};
  }

  /// The same for a pass over the gradients, all of one norm group.
  statistics_table_view host_statistics_table() const {
    return {descriptors.data(), chunks.data(), chunks.size()};
  }
};

using host_tensors = placed_tensors<operand_bytes>;

/// A step block on the host.
struct host_block {
  step_scalars scalars;
  step_settings step;
  std::vector<group_settings> groups;
  std::vector<group_progress> progress;
  std::vector<math::adam_terms> terms;
  std::vector<math::prepared_group> prepared_groups;
  std::vector<double> norms;
  std::vector<schedule_segment> segments;
  std::vector<double> schedule_table;
  record_ring_view records;

  explicit host_block(std::size_t group_count, std::size_t norm_group_count = 1)
      : groups(group_count),
        progress(group_count),
        terms(group_count),
        prepared_groups(group_count),
        norms(norm_group_count) {
    // Every step that measures skips on what is not finite, unless a test wants otherwise.
    step.skip_non_finite = 1;
    for (std::size_t group = 0; group < group_count; ++group) {
      groups[group].learning_rate = 1e-3 * static_cast<double>(group + 1);
      groups[group].weight_decay = 0.01 * static_cast<double>(group);
    }
  }

  step_block_view view() {
    step_block_view view;
    view.scalars = &scalars;
    view.step = &step;
    view.groups = groups.data();
    view.progress = progress.data();
    view.schedules = {segments.data(), schedule_table.data()};
    view.terms = terms.data();
    view.prepared_groups = prepared_groups.data();
    view.norms = norms.data();
    view.records = records;
    view.group_count = static_cast<std::uint32_t>(groups.size());
    view.norm_group_count = static_cast<std::uint32_t>(norms.size());
    return view;
  }
};

/// A batch whose entries lie where the caller keeps them.
inline settings_batch batch_of(std::span<const setting> entries, std::uint64_t serial) {
  settings_batch batch;
  batch.entries = entries.data();
  batch.count = static_cast<std::uint32_t>(entries.size());
  batch.serial = serial;
  return batch;
}

/// A batch that carries its few entries itself.
inline settings_batch inline_batch_of(std::span<const setting> entries, std::uint64_t serial) {
  settings_batch batch = batch_of(entries, serial);
  batch.entries = nullptr;
  std::copy(entries.begin(), entries.end(), batch.few);
  return batch;
}

/// Advances a block by a step that measured nothing.
inline void advance_unmeasured(host_block& block, const settings_batch& settings = {}) {
  host::advance_step(block.view(), settings, {}, nullptr);
}

/// Advances a block by a step whose gradient has this total.
inline void advance_by_total(host_block& block, double total, const settings_batch& settings = {}) {
  host::advance_step(block.view(), settings, {total, 0, 1}, &total);
}

/// grad_stats with its advance.
inline void measure_and_advance(host_block& block, const statistics_table_view& table,
                                const settings_batch& settings = {}, bool count_zeros = false) {
  std::vector<double> totals(table.norm_group_count);
  const gradient_statistics found =
      host::grad_stats(table, {block.step.norm, count_zeros}, totals.data());
  host::advance_step(block.view(), settings, found, totals.data());
}

}  // namespace stepgraph::test
