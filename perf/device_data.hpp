#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "stepgraph/math/storage_format.hpp"

/// Kernels of the benchmarks' own. They use nothing of the library's memory layer, so that the
/// limit they measure does not move with it.
namespace stepgraph::perf {

/// Fills `elements` elements with uniform random numbers in [low, high). Enqueued onto the default
/// stream.
void fill_random(void* data, storage_format format, std::uint64_t elements, float low, float high,
                 std::uint64_t seed);

/// What `cuda_launch_pure_stream` moves.
struct pure_stream_operands {
  struct entry {
    void* data;
    std::uint32_t element_bytes;
    bool read;
    bool written;  ///< with what was read there, or with zeros where nothing is read
  };
  entry entries[5];
  int count = 0;
};

/// Reads and writes every operand once, 16 bytes an access, all reads of a block before its writes.
/// `elements` must be a multiple of 2048.
cudaError_t cuda_launch_pure_stream(const pure_stream_operands& operands, std::uint64_t elements,
                                    cudaStream_t stream);

}  // namespace stepgraph::perf
