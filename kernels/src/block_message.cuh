#pragma once

#include "stepgraph/kernels/cuda_launch.hpp"

/// Messages between the blocks of one launch. Each 8-byte word carries 4 bytes and the tag of the
/// launch; 8 bytes are stored and loaded as one, so a word with the right tag is the right word.
/// This saves the two round trips of a fence and a counter that a last block to finish would need.
namespace stepgraph::cuda {

struct message_payload {
  double total = 0.0;
  std::uint32_t zeros = 0;
};

/// The tag of the launch that is running: nobody moves the counter before all messages are read.
__device__ __forceinline__ std::uint32_t message_tag(const step_block_view& block) {
  return static_cast<std::uint32_t>(block.scalars->launches) + 1u;
}

__device__ __forceinline__ void send(block_message* message, std::uint32_t tag,
                                     const message_payload& payload) {
  const auto word = [&](std::uint32_t value) {
    return static_cast<std::uint64_t>(tag) << 32 | value;
  };
  const auto bits = static_cast<std::uint64_t>(__double_as_longlong(payload.total));
  const std::uint64_t low = word(static_cast<std::uint32_t>(bits));
  const std::uint64_t high = word(static_cast<std::uint32_t>(bits >> 32));
  const std::uint64_t zeros = word(payload.zeros);
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(message->words), "l"(low),
               "l"(high)
               : "memory");
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(message->words + 2), "l"(zeros)
               : "memory");
}

/// Waits for a message. The sender is a block of the same launch, which waits for nobody.
__device__ __forceinline__ message_payload receive(const block_message* message,
                                                   std::uint32_t tag) {
  std::uint64_t low, high, zeros;
  const auto is_of_launch = [&](std::uint64_t word) { return word >> 32 == tag; };
  do {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(low), "=l"(high)
                 : "l"(message->words)
                 : "memory");
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(zeros)
                 : "l"(message->words + 2)
                 : "memory");
  } while (!is_of_launch(low) || !is_of_launch(high) || !is_of_launch(zeros));
  message_payload payload;
  payload.total = __longlong_as_double(static_cast<long long>(high << 32 | (low & 0xffffffffu)));
  payload.zeros = static_cast<std::uint32_t>(zeros);
  return payload;
}

}  // namespace stepgraph::cuda
