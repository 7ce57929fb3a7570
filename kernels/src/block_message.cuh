#pragma once

#include "stepgraph/kernels/cuda_launch.hpp"
#include "stepgraph/kernels/tagged_word.hpp"

/// Messages between the blocks of one launch, of tagged words. This saves the two round trips of a
/// fence and a counter that a last block to finish would need.
namespace stepgraph::cuda {

struct message_payload {
  double total = 0.0;
  std::uint64_t zeros = 0;  ///< of one block, if it is sent: it travels as 32 bits
};

/// The tag of the launch that is running, whose scalars are still those of the launch before:
/// nobody moves the counter before all messages are read.
__device__ __forceinline__ std::uint32_t message_tag(const step_scalars& scalars) {
  return tag_of_launch(scalars.launches + 1);
}

/// Without its zeros a message is one access.
template <bool WithZeros>
__device__ __forceinline__ void send(block_message* message, std::uint32_t tag,
                                     const message_payload& payload) {
  const auto bits = static_cast<std::uint64_t>(__double_as_longlong(payload.total));
  const std::uint64_t low = tagged_word(tag, static_cast<std::uint32_t>(bits));
  const std::uint64_t high = tagged_word(tag, static_cast<std::uint32_t>(bits >> 32));
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(message->words), "l"(low),
               "l"(high)
               : "memory");
  if constexpr (WithZeros) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(message->words + 2),
                 "l"(tagged_word(tag, static_cast<std::uint32_t>(payload.zeros)))
                 : "memory");
  }
}

/// Waits for a message. The sender is a block of the same launch, which waits for nobody.
template <bool WithZeros>
__device__ __forceinline__ message_payload receive(const block_message* message,
                                                   std::uint32_t tag) {
  std::uint64_t low, high, zeros = tagged_word(tag, 0);
  do {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(low), "=l"(high)
                 : "l"(message->words)
                 : "memory");
    if constexpr (WithZeros) {
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                   : "=l"(zeros)
                   : "l"(message->words + 2)
                   : "memory");
    }
  } while (tag_of(low) != tag || tag_of(high) != tag || tag_of(zeros) != tag);
  message_payload payload;
  payload.total = __longlong_as_double(static_cast<long long>(high << 32 | value_of(low)));
  payload.zeros = value_of(zeros);
  return payload;
}

}  // namespace stepgraph::cuda
