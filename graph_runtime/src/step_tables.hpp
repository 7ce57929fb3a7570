#pragma once

#include <vector>

#include "stepgraph/executor.hpp"
#include "stepgraph/kernels/step_block.hpp"

namespace stepgraph::detail {

/// The tables of a plan in host memory: the tensors in the plan's order, the chunks node by node.
struct step_tables {
  std::vector<tensor_descriptor> tensors;
  std::vector<chunk_descriptor> chunks;

  struct chunk_range {
    std::uint64_t first = 0;
    std::uint64_t count = 0;
  };
  std::vector<chunk_range> node_chunks;  ///< of each plan node

  /// The chunks of grad_stats, norm group by norm group and each group filled up to whole blocks.
  /// Empty if they are those of the nodes that follow, in the same order.
  std::vector<chunk_descriptor> statistics_chunks;
  /// Blocks of grad_stats before the end of each norm group.
  std::vector<std::uint32_t> norm_group_ends;

  explicit step_tables(const step_plan& plan);

  /// Points an operand, and its scales if it has them, elsewhere.
  void rebind(tensor_id tensor, operand_kind operand, void* data, std::uint8_t* scales);

  /// The number of chunks that grad_stats reads.
  std::uint64_t statistics_chunk_count() const;

  /// Where those chunks are in host memory.
  const chunk_descriptor* statistics_data() const;
  /// The tables as seen by grad_stats, at the addresses given.
  statistics_table_view statistics_view(const tensor_descriptor* tensors_at,
                                        const chunk_descriptor* chunks_at,
                                        const std::uint32_t* norm_group_ends_at) const;

  /// The tables as seen by an update, at the addresses given.
  tensor_table_view view_of_node(std::size_t node, const tensor_descriptor* tensors_at,
                                 const chunk_descriptor* chunks_at,
                                 std::uint32_t* arrivals_at) const;

 private:
  void place_statistics_chunks(const step_plan& plan);
};

/// Where a descriptor keeps one operand.
struct operand_slot {
  void** data;
  std::uint8_t** scales;  ///< null: it never has any
};
operand_slot slot_of(tensor_descriptor& descriptor, operand_kind operand);

/// What a descriptor keeps of one operand.
void* address_in(const tensor_descriptor& descriptor, operand_kind operand);
std::uint8_t* scales_in(const tensor_descriptor& descriptor, operand_kind operand);

/// The format of one operand; none if the signature does not have it.
storage_format format_of(const update_signature& signature, operand_kind operand);

/// The initial contents of an executor's step block.
struct step_block_image {
  step_scalars scalars;
  step_settings step;
  std::vector<group_settings> groups;
  std::vector<group_progress> progress;
  std::vector<double> norms;  ///< one of each norm group, zero
  std::vector<schedule_segment> schedule_segments;
  std::vector<double> schedule_table;

  explicit step_block_image(const step_plan& plan);

 private:
  schedule_reference append(const std::optional<schedule>& added);
};

/// The options of an update node, and of grad_stats.
update_options make_update_options(const step_options& options);
statistics_options make_statistics_options(const step_options& options);

/// A status from what was read back.
step_status make_status(const step_scalars& scalars, const std::vector<group_progress>& progress,
                        std::vector<double> norms);

}  // namespace stepgraph::detail
