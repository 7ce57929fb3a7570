#pragma once

#include <cstdint>

#include "stepgraph/math/rounding.hpp"
#include "stepgraph/math/storage_format.hpp"

/// The memory layer of the device: moves a few elements of one operand between memory and f32
/// registers. It knows formats and addresses, and nothing of what is computed.
namespace stepgraph::cuda {

/// A few elements in registers.
template <int Width>
struct float_pack {
  float value[Width];
};

/// Width consecutive elements from `first`, which is a multiple of Width in a tensor whose
/// operands are aligned to 16 bytes: accesses of up to 16 bytes.
struct vector_access {
  std::uint64_t first;
};

/// Elements first, first + stride, ... of which `count` exist: one access an element, coalesced
/// over the warp whatever the alignment. Elements past `count` read as zero and are not written.
struct element_access {
  std::uint64_t first;
  std::uint32_t stride;
  int count;
};

/// Tells the compiler that an address read from a table is global memory, so that it need not emit
/// generic accesses.
template <class Pointer>
__device__ __forceinline__ Pointer in_global_memory(Pointer pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

/// Unsigned words that together hold `Bytes` bytes.
template <int Bytes>
struct raw_words;
template <>
struct raw_words<4> {
  using type = unsigned int;
};
template <>
struct raw_words<8> {
  using type = uint2;
};
template <>
struct raw_words<16> {
  using type = uint4;
};

/// Loads and stores of one operand whose format is known at compile time.
template <storage_format Format>
struct static_operand {
  using traits = math::format_traits<Format>;
  using storage = typename traits::storage;

  __device__ explicit static_operand(storage_format) {}
  static __device__ constexpr bool exists() { return true; }

  template <int Width>
  __device__ __forceinline__ float_pack<Width> load(const void* base, vector_access at) const {
    constexpr int per_access = 16 / sizeof(storage) < Width ? 16 / sizeof(storage) : Width;
    using words = typename raw_words<per_access * sizeof(storage)>::type;
    const auto* source = in_global_memory(
        reinterpret_cast<const words*>(static_cast<const storage*>(base) + at.first));
    float_pack<Width> pack;
#pragma unroll
    for (int access = 0; access < Width / per_access; ++access) {
      union {
        words raw;
        storage element[per_access];
      } bits;
      bits.raw = source[access];
#pragma unroll
      for (int i = 0; i < per_access; ++i) {
        pack.value[access * per_access + i] = traits::decode(bits.element[i]);
      }
    }
    return pack;
  }

  template <int Width>
  __device__ __forceinline__ void store(void* base, vector_access at,
                                        const float_pack<Width>& pack) const {
    constexpr int per_access = 16 / sizeof(storage) < Width ? 16 / sizeof(storage) : Width;
    using words = typename raw_words<per_access * sizeof(storage)>::type;
    auto* target =
        in_global_memory(reinterpret_cast<words*>(static_cast<storage*>(base) + at.first));
#pragma unroll
    for (int access = 0; access < Width / per_access; ++access) {
      union {
        words raw;
        storage element[per_access];
      } bits;
#pragma unroll
      for (int i = 0; i < per_access; ++i) {
        bits.element[i] = traits::encode(pack.value[access * per_access + i]);
      }
      target[access] = bits.raw;
    }
  }

  template <int Width>
  __device__ __forceinline__ float_pack<Width> load(const void* base, element_access at) const {
    const storage* source = in_global_memory(static_cast<const storage*>(base) + at.first);
    float_pack<Width> pack;
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      pack.value[i] = i < at.count ? traits::decode(source[i * at.stride]) : 0.0f;
    }
    return pack;
  }

  template <int Width>
  __device__ __forceinline__ void store(void* base, element_access at,
                                        const float_pack<Width>& pack) const {
    storage* target = in_global_memory(static_cast<storage*>(base) + at.first);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      if (i < at.count) target[i * at.stride] = traits::encode(pack.value[i]);
    }
  }
};

/// An operand that does not exist.
template <>
struct static_operand<storage_format::none> {
  __device__ explicit static_operand(storage_format) {}
  static __device__ constexpr bool exists() { return false; }
  template <int Width, class Access>
  __device__ __forceinline__ float_pack<Width> load(const void*, Access) const {
    return {};
  }
  template <int Width, class Access>
  __device__ __forceinline__ void store(void*, Access, const float_pack<Width>&) const {}
};

/// Calls `body` with the static operand of a format that is known only at run time. The format is
/// the same for a whole block, so the branch is uniform.
template <class Body>
__device__ __forceinline__ void with_static_operand(storage_format format, Body&& body) {
  // The compiler must not see that two switches test the same value: it would thread one path
  // through all of them for every combination of formats.
  unsigned int opaque = static_cast<unsigned int>(format);
  asm volatile("" : "+r"(opaque));
  switch (static_cast<storage_format>(opaque)) {
    case storage_format::none:
      body(static_operand<storage_format::none>(format));
      break;
    case storage_format::f32:
      body(static_operand<storage_format::f32>(format));
      break;
    case storage_format::f16:
      body(static_operand<storage_format::f16>(format));
      break;
    case storage_format::bf16:
      body(static_operand<storage_format::bf16>(format));
      break;
  }
}

/// Loads and stores of one operand whose format is read from the tensor table.
struct dynamic_operand {
  storage_format format;

  __device__ explicit dynamic_operand(storage_format stored) : format(stored) {}
  __device__ bool exists() const { return format != storage_format::none; }

  template <int Width, class Access>
  __device__ __forceinline__ float_pack<Width> load(const void* base, Access at) const {
    float_pack<Width> pack = {};
    with_static_operand(format,
                        [&](auto operand) { pack = operand.template load<Width>(base, at); });
    return pack;
  }

  template <int Width, class Access>
  __device__ __forceinline__ void store(void* base, Access at,
                                        const float_pack<Width>& pack) const {
    with_static_operand(format, [&](auto operand) { operand.store(base, at, pack); });
  }
};

}  // namespace stepgraph::cuda
