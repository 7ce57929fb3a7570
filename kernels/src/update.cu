#include "stepgraph/kernels/cuda_launch.hpp"
#include "update_kernel.cuh"

namespace stepgraph::cuda {
namespace {

using update_kernel_pointer = void (*)(tensor_table_view, step_block_view, update_options);

template <storage_format Parameter, storage_format Gradient, storage_format Master,
          storage_format ExpAvg, storage_format ExpAvgSq>
using tuned_operands =
    update_operands<static_operand<Parameter>, static_operand<Gradient>, static_operand<Master>,
                    static_operand<ExpAvg>, static_operand<ExpAvgSq>>;

using generic_operands = update_operands<dynamic_operand, dynamic_operand, dynamic_operand,
                                         dynamic_operand, dynamic_operand>;

update_kernel_pointer kernel_of(const update_signature& signature) {
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq)          \
  if (signature == update_signature{storage_format::parameter, storage_format::gradient,     \
                                    storage_format::master, storage_format::exp_avg,         \
                                    storage_format::exp_avg_sq}) {                           \
    return update_kernel<tuned_operands<storage_format::parameter, storage_format::gradient, \
                                        storage_format::master, storage_format::exp_avg,     \
                                        storage_format::exp_avg_sq>>;                        \
  }
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  return update_kernel<generic_operands>;
}

}  // namespace

cudaError_t launch_update(const update_signature& signature, const tensor_table_view& table,
                          const step_block_view& block, const update_options& options,
                          launch_order order, cudaStream_t stream) {
  return launch(kernel_of(signature), static_cast<std::uint32_t>(table.chunk_count), update_threads,
                order, stream, table, block, options);
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
