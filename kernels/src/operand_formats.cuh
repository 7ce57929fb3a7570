#pragma once

#include <cstdint>
#include <type_traits>

#include "operand_access.cuh"
#include "pair_conversions.cuh"
#include "stepgraph/kernels/tensor_table.hpp"
#include "stepgraph/math/block_scale.hpp"
#include "stepgraph/math/fp8.hpp"
#include "stepgraph/math/remainder.hpp"
#include "stepgraph/math/rounding.hpp"
#include "stepgraph/math/stochastic_rounding.hpp"

/// Formats of the device: an operand turns stored elements into f32 values and back. Each kind of
/// storage is one class over the memory movement of operand_access.cuh; each has a constructor that
/// takes the addresses it needs, and
///   stored_bits<Width> fetch<Width>(Access) const       issues the loads
///   float_pack<Width> decode(stored_bits<Width>) const  waits for them
///   void store(Access, float_pack<Width>) const
/// All threads of a warp call them together; thread t of a block holds consecutive elements of the
/// chunk after those of thread t - 1, unless no operand of the signature is block-scaled.
namespace stepgraph::cuda {

template <int Width>
__device__ __forceinline__ float_pack<Width> scaled(float_pack<Width> pack, float factor) {
#pragma unroll
  for (int i = 0; i < Width; ++i) pack.value[i] *= factor;
  return pack;
}

/// f32, f16 or bf16 without a scale.
template <storage_format Format>
struct plain_operand {
  void* data;

  template <int Width, class Access>
  __device__ __forceinline__ stored_bits<Width> fetch(Access at) const {
    return load_stored<bits_of<Format>, Width>(data, at);
  }
  template <int Width>
  __device__ __forceinline__ float_pack<Width> decode(const stored_bits<Width>& bits) const {
    return decode_pack<Format>(bits);
  }
  template <int Width, class Access>
  __device__ __forceinline__ void store(Access at, const float_pack<Width>& pack) const {
    store_stored<bits_of<Format>>(data, at, encode_pack<Format>(pack));
  }
};

/// The largest of a value over the threads that hold one scale block.
template <int Width>
__device__ __forceinline__ std::uint32_t largest_of_scale_block(std::uint32_t value) {
  constexpr int lanes = static_cast<int>(scale_block_elements) / Width;
  static_assert(lanes <= 32, "a scale block must not span warps");
  if constexpr (lanes == 32) {
    return __reduce_max_sync(0xffffffffu, value);
  } else {
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
  }
}

/// f16 or e4m3 with a power of two for each scale block. `Root`: the values are not negative and
/// their square roots are stored.
template <storage_format Format, bool Root>
struct block_scaled_operand {
  void* data;
  std::uint8_t* scales;

  template <int Width, class Access>
  __device__ __forceinline__ stored_bits<Width> fetch(Access at) const {
    stored_bits<Width> bits = load_stored<bits_of<Format>, Width>(data, at);
    if (exists(at)) bits.scale = in_global_memory(scales)[at.first / scale_block_elements];
    return bits;
  }
  template <int Width>
  __device__ __forceinline__ float_pack<Width> decode(const stored_bits<Width>& bits) const {
    float_pack<Width> pack = scaled(decode_pack<Format>(bits), math::block_factor(bits.scale));
    if constexpr (Root) {
#pragma unroll
      for (int i = 0; i < Width; ++i) pack.value[i] *= pack.value[i];
    }
    return pack;
  }
  template <int Width, class Access>
  __device__ __forceinline__ void store(Access at, const float_pack<Width>& pack) const {
    float_pack<Width> kept;
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      kept.value[i] = Root ? math::stored_root(pack.value[i]) : pack.value[i];
      if (is_beyond(at, i)) kept.value[i] = 0.0f;
      largest = math::larger_magnitude(largest, kept.value[i]);
    }
    // Magnitudes are ordered as their bits.
    const std::uint32_t scale =
        math::block_scale_of<Format>(largest_of_scale_block<Width>(math::float_bits(largest)));
    const float factor = math::inverse_block_factor(scale);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      kept.value[i] =
          Root ? math::scaled_root<Format>(kept.value[i], factor) : kept.value[i] * factor;
    }
    store_stored<bits_of<Format>>(data, at, encode_pack<Format>(kept));
    if (at.first % scale_block_elements == 0 && exists(at)) {
      in_global_memory(scales)[at.first / scale_block_elements] = static_cast<std::uint8_t>(scale);
    }
  }

 private:
  static __device__ __forceinline__ bool exists(vector_access) { return true; }
  static __device__ __forceinline__ bool exists(element_access at) { return at.count > 0; }
  static __device__ __forceinline__ bool is_beyond(vector_access, int) { return false; }
  static __device__ __forceinline__ bool is_beyond(element_access at, int i) {
    return i >= at.count;
  }
};

/// e4m3 or e5m2 with one scale for the tensor.
template <storage_format Format>
struct tensor_scaled_operand {
  void* data;
  const float* scale_inv;
  float scale;  ///< read before the block stores anything

  template <int Width, class Access>
  __device__ __forceinline__ stored_bits<Width> fetch(Access at) const {
    stored_bits<Width> bits = load_stored<bits_of<Format>, Width>(data, at);
    bits.scale = __float_as_uint(*in_global_memory(scale_inv));
    return bits;
  }
  template <int Width>
  __device__ __forceinline__ float_pack<Width> decode(const stored_bits<Width>& bits) const {
    return scaled(decode_pack<Format>(bits), __uint_as_float(bits.scale));
  }
  template <int Width, class Access>
  __device__ __forceinline__ void store(Access at, const float_pack<Width>& pack) const {
    store_stored<bits_of<Format>>(data, at, encode_pack<Format>(scaled(pack, scale)));
  }
};

/// The f32 whose upper half is a bf16 parameter and whose lower half is a remainder.
struct joined_operand {
  void* parameter;
  void* remainder;

  /// The parameter's bits, then the remainder's.
  template <int Width, class Access>
  __device__ __forceinline__ stored_bits<Width> fetch(Access at) const {
    stored_bits<Width> bits = load_stored<std::uint16_t, Width>(parameter, at);
    const stored_bits<Width> low = load_stored<std::uint16_t, Width>(remainder, at);
#pragma unroll
    for (int i = 0; i < Width / 2; ++i) bits.word[Width / 2 + i] = low.word[i];
    return bits;
  }
  template <int Width>
  __device__ __forceinline__ float_pack<Width> decode(const stored_bits<Width>& bits) const {
    float_pack<Width> pack;
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      pack.value[i] = math::join_remainder(element_of<std::uint16_t>(bits, i),
                                           element_of<std::uint16_t>(bits, Width + i));
    }
    return pack;
  }
  template <int Width, class Access>
  __device__ __forceinline__ void store(Access at, const float_pack<Width>& pack) const {
    stored_bits<Width> high;
    stored_bits<Width> low;
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      set_element<std::uint16_t>(high, i, math::rounded_parameter(pack.value[i]));
      set_element<std::uint16_t>(low, i, math::remainder_of(pack.value[i]));
    }
    store_stored<std::uint16_t>(parameter, at, high);
    store_stored<std::uint16_t>(remainder, at, low);
  }
};

/// A bf16 parameter rounded stochastically. Width is a multiple of 4 and the elements are
/// consecutive.
template <int Width, class Access>
__device__ __forceinline__ void store_stochastically(void* data,
                                                     const math::rounding_source& source, Access at,
                                                     const float_pack<Width>& pack) {
  stored_bits<Width> stored;
#pragma unroll
  for (int quad = 0; quad < Width / 4; ++quad) {
    const math::random_words random = math::random_of(source, at.first / 4 + quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      set_element<std::uint16_t>(
          stored, quad * 4 + i,
          math::round_stochastically(pack.value[quad * 4 + i], random.word[i]));
    }
  }
  store_stored<std::uint16_t>(data, at, stored);
}

/// A format that is known at compile time.
template <storage_format Format>
struct known_format {
  __device__ explicit known_format(storage_format) {}
  static __device__ constexpr storage_format value() { return Format; }

  /// Calls `body` with the format as an integral constant if it is one of `Allowed`.
  template <storage_format... Allowed, class Body>
  __device__ __forceinline__ void visit(Body&& body) const {
    if constexpr (((Format == Allowed) || ...)) {
      body(std::integral_constant<storage_format, Format>{});
    }
  }
};

/// A format read from the tensor table. It is the same for a whole block: branches are uniform.
struct table_format {
  storage_format format;

  __device__ explicit table_format(storage_format stored) : format(stored) {}
  __device__ storage_format value() const { return format; }

  template <storage_format... Allowed, class Body>
  __device__ __forceinline__ void visit(Body&& body) const {
    // The compiler must not see that two visits test the same value: it would thread one path
    // through all of them for every combination of formats.
    unsigned int opaque = static_cast<unsigned int>(format);
    asm volatile("" : "+r"(opaque));
    const auto is_this = [&](auto candidate) {
      if (opaque != static_cast<unsigned int>(candidate.value)) return false;
      body(candidate);
      return true;
    };
    static_cast<void>((is_this(std::integral_constant<storage_format, Allowed>{}) || ...));
  }
};

/// A moment or master.
template <storage_format Format, bool Root>
__device__ __forceinline__ auto state_of(void* data, std::uint8_t* scales) {
  if constexpr (is_block_scaled(Format)) {
    return block_scaled_operand<Format, Root>{data, scales};
  } else {
    return plain_operand<Format>{data};
  }
}

template <storage_format Format>
__device__ __forceinline__ auto parameter_of(const tensor_descriptor& tensor, float scale) {
  if constexpr (is_fp8(Format)) {
    return tensor_scaled_operand<Format>{tensor.parameter, tensor.parameter_scaling.scale_inv,
                                         scale};
  } else {
    return plain_operand<Format>{tensor.parameter};
  }
}

}  // namespace stepgraph::cuda
