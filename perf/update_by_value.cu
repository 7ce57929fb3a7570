#include "../kernels/src/update_kernel.cuh"
#include "update_by_value.hpp"

namespace stepgraph::perf {
namespace {

/// The terms as an argument of the launch.
struct terms_by_value {
  math::adam_terms terms;

  __device__ cuda::block_terms read(std::uint32_t) const { return {terms, 1, false}; }
  __device__ void write_record() const {}
};

}  // namespace

cudaError_t launch_update_by_value(const update_signature& signature,
                                   const tensor_table_view& table, const math::adam_terms& terms,
                                   const update_options& options, cudaStream_t stream) {
  using enum storage_format;
  const auto launch_with = [&](auto kernel) {
    return cuda::launch(
        kernel, static_cast<std::uint32_t>(table.chunk_count * update_blocks_per_chunk),
        update_threads, cuda::launch_order::full, stream, table, terms_by_value{terms}, options);
  };
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq)                \
  if (signature == update_signature{parameter, gradient, master, exp_avg, exp_avg_sq}) {           \
    return launch_with(                                                                            \
        cuda::update_kernel<cuda::tuned_formats<parameter, gradient, master, exp_avg, exp_avg_sq>, \
                            terms_by_value>);                                                      \
  }
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  return cudaErrorInvalidValue;
}

}  // namespace stepgraph::perf
