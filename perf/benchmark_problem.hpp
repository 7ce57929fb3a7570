#pragma once

#include <cstdint>
#include <vector>

#include "operand_memory.hpp"
#include "stepgraph/executor.hpp"
#include "stepgraph/step_builder.hpp"
#include "tensor_list.hpp"

#if defined(STEPGRAPH_HAS_CUDA)
#include "pure_stream.hpp"
#endif

namespace stepgraph::perf {

/// The tensors of a step in memory, filled with random numbers in the ranges of a model in
/// training. Every operand of all tensors lies in one allocation, tensor after tensor, each tensor
/// at a multiple of 128 elements, so that the copy kernel can run over it in one piece.
class benchmark_problem {
 public:
  /// Allocates and fills; waits until that is done. Throws when memory is short.
  benchmark_problem(const update_signature& signature, const tensor_list& list,
                    device_location location);

  /// A plan of AdamW over the tensors. Every group gets `group`'s hyperparameters.
  step_plan plan(const step_options& options = {},
                 const group_options& group = {.learning_rate = 1e-4, .weight_decay = 0.01}) const;

  /// Where an operand of a tensor lies.
  void* address(operand_kind kind, tensor_id tensor) const;

  std::uint32_t tensor_count() const { return static_cast<std::uint32_t>(numels_.size()); }
  /// Elements of an operand over all tensors, with what lies between the tensors.
  std::uint64_t element_count() const { return offsets_.back(); }
  std::uint32_t group_count() const { return group_per_tensor_ ? tensor_count() : 1; }

#if defined(STEPGRAPH_HAS_CUDA)
  /// The copy kernel over the same memory, for what `plan()` moves.
  pure_stream stream_limit(cudaStream_t stream) const;
#endif

 private:
  struct operand {
    storage_format format = storage_format::none;
    operand_memory memory = {nullptr, [](void*) {}};
    operand_memory scales = {nullptr, [](void*) {}};  ///< of a block-scaled master or moment
  };
  const operand& operand_of(operand_kind kind) const;
  tensor_view view_of(operand_kind kind, tensor_id tensor) const;

  update_signature signature_;
  device_location location_;
  std::vector<std::uint64_t> numels_;
  std::vector<std::uint64_t> offsets_;  ///< of each tensor's first element, and of the end
  bool group_per_tensor_;
  operand parameter_, gradient_, master_, exp_avg_, exp_avg_sq_;
  /// scale, amax and scale_inv of each tensor with an FP8 parameter, all 1
  operand_memory parameter_scaling_ = {nullptr, [](void*) {}};
};

/// Bytes of memory the problem takes, without block scales.
std::uint64_t memory_of(const update_signature& signature, const tensor_list& list);

}  // namespace stepgraph::perf
