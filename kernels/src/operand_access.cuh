#pragma once

#include <cstdint>

/// Memory movement of the device: moves a few elements of one operand between memory and
/// registers. It knows addresses and element sizes, and nothing of formats or of what is computed.
namespace stepgraph::cuda {

/// A few elements as they are stored.
template <class Storage, int Width>
struct stored_pack {
  Storage element[Width];
};

/// Width consecutive elements from `first`, which is a multiple of Width in a tensor whose
/// operands are aligned to 16 bytes: accesses of up to 16 bytes.
struct vector_access {
  std::uint64_t first;
};

/// Elements first, first + stride, ... of which `count` exist: one access an element, whatever the
/// alignment. Elements past `count` read as zero bits and are not written.
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

/// How Width elements of Storage split into accesses of at most 16 bytes.
template <class Storage, int Width>
struct vector_split {
  static constexpr int per_access = 16 / static_cast<int>(sizeof(Storage)) < Width
                                        ? 16 / static_cast<int>(sizeof(Storage))
                                        : Width;
  static constexpr int accesses = Width / per_access;
  using words = typename raw_words<per_access* static_cast<int>(sizeof(Storage))>::type;
  union bits {
    words raw;
    Storage element[per_access];
  };
};

template <class Storage, int Width>
__device__ __forceinline__ stored_pack<Storage, Width> load_stored(const void* base,
                                                                   vector_access at) {
  using split = vector_split<Storage, Width>;
  const auto* source = in_global_memory(
      reinterpret_cast<const typename split::words*>(static_cast<const Storage*>(base) + at.first));
  stored_pack<Storage, Width> pack;
#pragma unroll
  for (int access = 0; access < split::accesses; ++access) {
    typename split::bits bits;
    bits.raw = source[access];
#pragma unroll
    for (int i = 0; i < split::per_access; ++i) {
      pack.element[access * split::per_access + i] = bits.element[i];
    }
  }
  return pack;
}

template <class Storage, int Width>
__device__ __forceinline__ void store_stored(void* base, vector_access at,
                                             const stored_pack<Storage, Width>& pack) {
  using split = vector_split<Storage, Width>;
  auto* target = in_global_memory(
      reinterpret_cast<typename split::words*>(static_cast<Storage*>(base) + at.first));
#pragma unroll
  for (int access = 0; access < split::accesses; ++access) {
    typename split::bits bits;
#pragma unroll
    for (int i = 0; i < split::per_access; ++i) {
      bits.element[i] = pack.element[access * split::per_access + i];
    }
    target[access] = bits.raw;
  }
}

template <class Storage, int Width>
__device__ __forceinline__ stored_pack<Storage, Width> load_stored(const void* base,
                                                                   element_access at) {
  const Storage* source = in_global_memory(static_cast<const Storage*>(base) + at.first);
  stored_pack<Storage, Width> pack;
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    pack.element[i] = i < at.count ? source[i * at.stride] : Storage{};
  }
  return pack;
}

template <class Storage, int Width>
__device__ __forceinline__ void store_stored(void* base, element_access at,
                                             const stored_pack<Storage, Width>& pack) {
  Storage* target = in_global_memory(static_cast<Storage*>(base) + at.first);
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    if (i < at.count) target[i * at.stride] = pack.element[i];
  }
}

}  // namespace stepgraph::cuda
