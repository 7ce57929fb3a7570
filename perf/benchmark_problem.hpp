#pragma once

#include <cstdint>

#include "stepgraph/cuda/handles.hpp"
#include "stepgraph/step_builder.hpp"

/// What the benchmarks share: tensors of one signature in device memory, filled with random
/// numbers, and the copy kernel that moves the same bytes without arithmetic.
namespace stepgraph::perf {

/// `tensors` tensors of `numel` elements each. Every operand of all tensors lies in one allocation,
/// so that the copy kernel can run over it in one piece.
class benchmark_problem {
 public:
  /// Parameters are random in [-1, 1), gradients in [-0.01, 0.01), exp_avg likewise and exp_avg_sq
  /// in [0, 1e-4): the ranges of a model in training. Throws cuda_error when memory is short.
  benchmark_problem(const update_signature& signature, std::uint32_t tensors, std::uint64_t numel);

  /// A plan of one AdamW group over the tensors.
  step_plan plan(const step_options& options = {}) const;

  /// Enqueues one kernel that reads what an update reads and writes what it writes, 16 bytes an
  /// access, and leaves every byte as it was: the limit that memory sets.
  void launch_pure_stream(cudaStream_t stream) const;

  /// Bytes that one update, or one run of the copy kernel, moves.
  std::uint64_t bytes() const;

 private:
  struct operand {
    storage_format format = storage_format::none;
    cuda::unique_device_memory memory;
  };
  tensor_view view_of(const operand& source, std::uint32_t tensor) const;

  update_signature signature_;
  std::uint32_t tensors_;
  std::uint64_t numel_;
  int device_ = 0;
  operand parameter_, gradient_, master_, exp_avg_, exp_avg_sq_;
};

/// Bytes of device memory the problem takes.
std::uint64_t memory_of(const update_signature& signature, std::uint32_t tensors,
                        std::uint64_t numel);

}  // namespace stepgraph::perf
