#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel_problem.hpp"

/// Chunk lists as grad_stats takes them: norm group by norm group, each filled up to whole blocks.
namespace stepgraph::test {

struct grouped_chunks {
  std::vector<chunk_descriptor> chunks;
  std::vector<std::uint32_t> ends;

  explicit grouped_chunks(const std::vector<std::vector<chunk_descriptor>>& groups) {
    std::uint64_t count = 0;
    for (const auto& group : groups) count += group.size();
    for (;;) {
      const std::uint32_t per_block = chunks_per_statistics_block(count);
      chunks.clear();
      ends.clear();
      for (const auto& group : groups) {
        chunks.insert(chunks.end(), group.begin(), group.end());
        while (chunks.size() % per_block != 0) chunks.push_back({no_tensor, 0});
        ends.push_back(static_cast<std::uint32_t>(chunks.size() / per_block));
      }
      count = chunks.size();
      if (chunks_per_statistics_block(count) == per_block) return;
    }
  }

  statistics_table_view view(const std::vector<tensor_descriptor>& tensors) const {
    return {tensors.data(), chunks.data(), chunks.size(), ends.data(),
            static_cast<std::uint32_t>(ends.size())};
  }
};

/// The chunks of placed tensors, each tensor in the norm group that its group names.
template <class Placed>
grouped_chunks chunks_by_group(const Placed& placed, std::size_t norm_groups) {
  std::vector<std::vector<chunk_descriptor>> groups(norm_groups);
  for (const chunk_descriptor& chunk : placed.chunks) {
    groups[placed.descriptors[chunk.tensor].group].push_back(chunk);
  }
  return grouped_chunks(groups);
}

/// Gradients of every format around every boundary, some unaligned, dealt out to norm groups.
inline std::vector<kernel_tensor> gradients_in_groups(std::uint32_t norm_groups) {
  std::vector<kernel_tensor> tensors;
  for (const std::uint64_t numel : {1u, 0u, 3u, 2047u, 2048u, 2049u, 9000u}) {
    for (const storage_format gradient :
         {storage_format::f32, storage_format::f16, storage_format::bf16}) {
      for (const std::uint64_t offset : {0u, 1u}) {
        update_signature signature;
        signature.gradient = gradient;
        const auto group = static_cast<std::uint32_t>(tensors.size()) % norm_groups;
        tensors.push_back({signature, numel, group, offset});
      }
    }
  }
  return tensors;
}

/// Replaces every `stride`-th gradient element by a zero of either sign.
inline void plant_zeros(const std::vector<kernel_tensor>& tensors,
                        std::vector<operand_set>& contents, std::size_t stride) {
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const storage_format format = tensors[t].signature.gradient;
    std::vector<float> values = decode(format, contents[t][gradient_operand]);
    for (std::size_t i = t % stride; i < values.size(); i += stride) {
      values[i] = i % 2 == 0 ? 0.0f : -0.0f;
    }
    contents[t][gradient_operand] = encode(format, values);
  }
}

/// A long list of short tensors that share one gradient, to keep it small: `count` chunks.
struct long_list {
  static constexpr std::uint32_t tensor_count = 64;
  std::vector<float> gradient;
  std::vector<tensor_descriptor> tensors;
  std::vector<chunk_descriptor> chunks;

  explicit long_list(std::uint32_t count) : gradient(tensor_count), tensors(tensor_count) {
    integer_generator random(46);
    for (float& value : gradient) value = random.signed_value(-7, 1);
    gradient[9] = 0.0f;
    for (std::uint32_t t = 0; t < tensor_count; ++t) tensors[t].numel = tensor_count - t;
    point_at(gradient.data());
    for (std::uint32_t i = 0; i < count; ++i) chunks.push_back({i % tensor_count, 0});
  }
  void point_at(float* shared) {
    for (std::uint32_t t = 0; t < tensor_count; ++t) tensors[t].gradient = shared + t;
  }
};

/// Lengths on both sides of every change of chunks_per_statistics_block.
inline constexpr std::uint32_t list_lengths[] = {512, 513, 5001, 16383, 16384};
inline constexpr std::uint32_t larger_list_lengths[] = {70003, 262143, 262144, 270001};

}  // namespace stepgraph::test
