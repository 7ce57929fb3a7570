#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "stepgraph/kernels/launch_shape.hpp"
#include "stepgraph/kernels/signature.hpp"

/// The tables through which kernels and host loops reach tensors: the same layout in host and in
/// device memory.
namespace stepgraph {

/// The scale of an FP8 parameter, one f32 each (Transformer Engine's delayed scaling). The update
/// stores parameter * scale, raises amax to the largest magnitude of the parameter and leaves
/// scale_inv = 1 / scale. Whoever owns the scaling recipe changes scale and resets amax.
struct fp8_scaling {
  const float* scale = nullptr;
  float* amax = nullptr;
  float* scale_inv = nullptr;
};

/// One tensor of the step. Pointers are borrowed and aligned to their element size; operands that
/// the signature does not have are null.
struct alignas(16) tensor_descriptor {
  void* parameter = nullptr;
  void* gradient = nullptr;
  void* master = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;
  // Scales of block-scaled operands: one byte for each scale_block_elements elements.
  std::uint8_t* master_scales = nullptr;
  std::uint8_t* exp_avg_scales = nullptr;
  std::uint8_t* exp_avg_sq_scales = nullptr;
  std::uint8_t* max_exp_avg_sq_scales = nullptr;
  fp8_scaling parameter_scaling;  ///< of an FP8 parameter
  std::uint64_t numel = 0;
  std::uint32_t group = 0;
  update_signature signature;
  std::uint8_t vectorizable = 0;  ///< every operand starts at a multiple of 16 bytes
  std::uint8_t reserved[5] = {};
};
static_assert(sizeof(tensor_descriptor) == 128);
static_assert(std::is_trivially_copyable_v<tensor_descriptor>);

/// The part of one tensor that one thread block updates: elements
/// [index * chunk_elements, min(numel, (index + 1) * chunk_elements)).
struct chunk_descriptor {
  std::uint32_t tensor = 0;
  std::uint32_t index = 0;
};

/// Names no tensor: a chunk that only fills up a block of `grad_stats`.
inline constexpr std::uint32_t no_tensor = 0xffffffffu;

/// The gradient of one chunk: all that a pass over the gradients needs to know of it.
struct alignas(16) gradient_run {
  void* data = nullptr;     ///< its first element
  std::uint32_t count = 0;  ///< elements; 0 of a chunk that names no tensor
  storage_format format = storage_format::f32;
  std::uint8_t aligned = 1;  ///< starts at a multiple of 16 bytes
  std::uint8_t reserved[2] = {};
};
static_assert(sizeof(gradient_run) == 16);

/// The gradient of a chunk of one of `tensors`.
STEPGRAPH_HOST_DEVICE gradient_run gradient_run_of(const chunk_descriptor& chunk,
                                                   const tensor_descriptor* tensors) {
  gradient_run run;
  if (chunk.tensor == no_tensor) return run;
  const tensor_descriptor& tensor = tensors[chunk.tensor];
  const std::uint64_t begin = static_cast<std::uint64_t>(chunk.index) * chunk_elements;
  const std::uint64_t remaining = tensor.numel - begin;
  run.format = tensor.signature.gradient;
  // Gradients are f32, f16 or bf16.
  const std::uint64_t element = run.format == storage_format::f32 ? 4 : 2;
  run.data = static_cast<unsigned char*>(tensor.gradient) + begin * element;
  run.count = remaining < chunk_elements ? static_cast<std::uint32_t>(remaining) : chunk_elements;
  run.aligned = reinterpret_cast<std::uintptr_t>(tensor.gradient) % 16 == 0 ? 1 : 0;
  return run;
}

/// True if every operand of the tensor starts at a multiple of 16 bytes.
bool all_operands_aligned(const tensor_descriptor& tensor);

/// The gradients of the chunks of a list so short that every block of `grad_stats` reads one; of a
/// longer list none.
std::vector<gradient_run> gradient_runs_of(std::span<const chunk_descriptor> chunks,
                                           const tensor_descriptor* tensors);

/// Appends the chunks of tensor number `tensor`, in order; none for an empty tensor.
void append_chunks(std::vector<chunk_descriptor>& chunks, std::uint32_t tensor,
                   std::uint64_t numel);

}  // namespace stepgraph
