#pragma once

#include <cstdint>

/// Memory movement of the device: moves a few elements of one operand between memory and
/// registers. It knows addresses and element sizes, and nothing of formats or of what is computed.
namespace stepgraph::cuda {

/// Width elements as they are stored, in the first words, and the scale of their block. One type
/// for every format, so that a branch on the format can end right after its loads were issued.
template <int Width>
struct stored_bits {
  std::uint32_t word[Width] = {};
  std::uint32_t scale = 0;
};

/// Reads element `i` of Storage.
template <class Storage, int Width>
__device__ __forceinline__ Storage element_of(const stored_bits<Width>& bits, int i) {
  constexpr int per_word = 4 / static_cast<int>(sizeof(Storage));
  const std::uint32_t word = bits.word[i / per_word];
  return static_cast<Storage>(word >> (i % per_word * 8 * static_cast<int>(sizeof(Storage))));
}

/// Sets element `i` of Storage, which must be zero.
template <class Storage, int Width>
__device__ __forceinline__ void set_element(stored_bits<Width>& bits, int i, Storage element) {
  constexpr int per_word = 4 / static_cast<int>(sizeof(Storage));
  bits.word[i / per_word] |= static_cast<std::uint32_t>(element)
                             << (i % per_word * 8 * static_cast<int>(sizeof(Storage)));
}

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

/// Loads Width elements of the unsigned type Storage.
template <class Storage, int Width>
__device__ __forceinline__ stored_bits<Width> load_stored(const void* base, vector_access at) {
  constexpr int words = Width * static_cast<int>(sizeof(Storage)) / 4;
  const Storage* source = static_cast<const Storage*>(base) + at.first;
  stored_bits<Width> bits;
  if constexpr (words == 1) {
    bits.word[0] = *in_global_memory(reinterpret_cast<const unsigned int*>(source));
  } else if constexpr (words == 2) {
    const uint2 two = *in_global_memory(reinterpret_cast<const uint2*>(source));
    bits.word[0] = two.x;
    bits.word[1] = two.y;
  } else {
    static_assert(words % 4 == 0);
#pragma unroll
    for (int access = 0; access < words / 4; ++access) {
      const uint4 four = in_global_memory(reinterpret_cast<const uint4*>(source))[access];
      bits.word[access * 4] = four.x;
      bits.word[access * 4 + 1] = four.y;
      bits.word[access * 4 + 2] = four.z;
      bits.word[access * 4 + 3] = four.w;
    }
  }
  return bits;
}

template <class Storage, int Width>
__device__ __forceinline__ void store_stored(void* base, vector_access at,
                                             const stored_bits<Width>& bits) {
  constexpr int words = Width * static_cast<int>(sizeof(Storage)) / 4;
  Storage* target = static_cast<Storage*>(base) + at.first;
  if constexpr (words == 1) {
    *in_global_memory(reinterpret_cast<unsigned int*>(target)) = bits.word[0];
  } else if constexpr (words == 2) {
    // Spelled out, because the compiler takes the assignment of a uint2 apart.
    asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                 :
                 : "l"(target), "r"(bits.word[0]), "r"(bits.word[1])
                 : "memory");
  } else {
    static_assert(words % 4 == 0);
#pragma unroll
    for (int access = 0; access < words / 4; ++access) {
      in_global_memory(reinterpret_cast<uint4*>(target))[access] =
          make_uint4(bits.word[access * 4], bits.word[access * 4 + 1], bits.word[access * 4 + 2],
                     bits.word[access * 4 + 3]);
    }
  }
}

template <class Storage, int Width>
__device__ __forceinline__ stored_bits<Width> load_stored(const void* base, element_access at) {
  const Storage* source = in_global_memory(static_cast<const Storage*>(base) + at.first);
  stored_bits<Width> bits;
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    if (i < at.count) set_element<Storage>(bits, i, source[i * at.stride]);
  }
  return bits;
}

template <class Storage, int Width>
__device__ __forceinline__ void store_stored(void* base, element_access at,
                                             const stored_bits<Width>& bits) {
  Storage* target = in_global_memory(static_cast<Storage*>(base) + at.first);
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    if (i < at.count) target[i * at.stride] = element_of<Storage>(bits, i);
  }
}

}  // namespace stepgraph::cuda
