#pragma once

#include <cstdint>
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

/// True if every operand of the tensor starts at a multiple of 16 bytes.
bool all_operands_aligned(const tensor_descriptor& tensor);

/// Appends the chunks of tensor number `tensor`, in order; none for an empty tensor.
void append_chunks(std::vector<chunk_descriptor>& chunks, std::uint32_t tensor,
                   std::uint64_t numel);

}  // namespace stepgraph
