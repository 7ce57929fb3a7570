#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "stepgraph/kernels/signature.hpp"

namespace stepgraph::perf {

/// The operands of an update in the order of `stream_addresses`.
enum class stream_operand : std::uint8_t {
  gradient,
  parameter,
  master,
  exp_avg,
  exp_avg_sq,
  max_exp_avg_sq,
  master_scales,
  exp_avg_scales,
  exp_avg_sq_scales,
  max_exp_avg_sq_scales,
};
inline constexpr int stream_operand_count = 10;

/// Where each operand lies, null for those the signature does not have. Multiples of 16 bytes.
struct stream_addresses {
  void* data[stream_operand_count] = {};

  void*& operator[](stream_operand operand) { return data[static_cast<int>(operand)]; }
};

/// The limit that memory sets to an update: a kernel that reads what the update reads and writes
/// what it writes, and computes nothing. It uses nothing of the library's memory layer, so that the
/// limit does not move with it.
///
/// There is one such kernel for each shape of a block (threads, elements) and cache hint, each
/// compiled for the operands' sizes; which is the fastest depends on the operands, so the
/// constructor tries them all on the memory given and keeps the best.
class pure_stream {
 public:
  /// Measures on `stream` and waits for it. Operands that are read keep their values; operands that
  /// are only written are filled with copies of other operands' bytes. Throws std::invalid_argument
  /// for a signature whose operand sizes are not in measured_signatures.def, cuda_error when a
  /// launch fails.
  pure_stream(const update_signature& signature, const stream_addresses& addresses,
              std::uint64_t elements, cudaStream_t stream);

  /// Enqueues one pass over all operands. Throws cuda_error.
  void launch(cudaStream_t stream) const;

  /// The fastest kernel: "<threads>x<elements a thread>", and "streaming" if it tells the caches
  /// that nothing is used twice.
  const std::string& variant() const { return variant_; }

 private:
  using kernel_pointer = void (*)(stream_addresses, std::uint64_t, unsigned int);

  void launch_kernel(kernel_pointer kernel, int threads, int elements_per_thread,
                     cudaStream_t stream) const;

  stream_addresses addresses_;
  std::uint64_t elements_;
  std::string variant_;
  kernel_pointer kernel_ = nullptr;
  int threads_ = 0;
  int elements_per_thread_ = 0;
};

}  // namespace stepgraph::perf
