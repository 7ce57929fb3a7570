#include "stepgraph/kernels/cuda_launch.hpp"
#include "update_kernel.cuh"

namespace stepgraph::cuda {
namespace {

using update_kernel_pointer = void (*)(tensor_table_view, terms_in_memory, update_options);

update_kernel_pointer kernel_of(const update_signature& signature) {
  using enum storage_format;
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq)       \
  if (signature == update_signature{parameter, gradient, master, exp_avg, exp_avg_sq}) {  \
    return update_kernel<tuned_formats<parameter, gradient, master, exp_avg, exp_avg_sq>, \
                         terms_in_memory>;                                                \
  }
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  return update_kernel<generic_formats, terms_in_memory>;
}

}  // namespace

cudaError_t launch_update(const update_signature& signature, const tensor_table_view& table,
                          const step_block_view& block, const update_options& options,
                          launch_order order, cudaStream_t stream) {
  const std::uint64_t blocks =
      table.chunk_count * update_blocks_per_chunk + (block.records.words != nullptr ? 1 : 0);
  return launch(kernel_of(signature), static_cast<std::uint32_t>(blocks), update_threads, order,
                stream, table, terms_in_memory{block}, options);
}

cudaError_t update_kernel_resources(const update_signature& signature, kernel_resources* result) {
  const auto kernel = reinterpret_cast<const void*>(kernel_of(signature));
  cudaFuncAttributes attributes = {};
  if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel)) return status;
  result->registers = attributes.numRegs;
  result->local_bytes = attributes.localSizeBytes;
  result->threads_per_block = update_threads;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&result->max_blocks_per_multiprocessor,
                                                       kernel, update_threads, 0);
}

}  // namespace stepgraph::cuda
