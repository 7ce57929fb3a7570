#include "regular_update.hpp"

#include "step_tables.hpp"
#include "stepgraph/cuda/check.hpp"
#include "update_by_value.hpp"

namespace stepgraph::perf {
namespace {

template <class Element>
cuda::unique_device_memory copy_to_device(const std::vector<Element>& source) {
  const std::size_t bytes = source.size() * sizeof(Element);
  cuda::unique_device_memory memory = cuda::allocate_device(bytes);
  STEPGRAPH_CUDA_CHECK(cudaMemcpy(memory.get(), source.data(), bytes, cudaMemcpyHostToDevice));
  return memory;
}

/// The thousandth step of AdamW with the usual betas and a learning rate of 1e-4.
math::adam_terms usual_terms() {
  math::adam_terms terms = {};
  terms.gradient_scale = 1.0f;
  terms.one_minus_beta1 = 0.1f;
  terms.one_minus_beta2 = 0.001f;
  terms.step_size = 1e-4f;
  terms.inverse_sqrt_bias2 = 1.2577f;
  terms.eps = 1e-8f;
  terms.decoupled_shrinkage = 1e-6f;
  return terms;
}

}  // namespace

regular_update::regular_update(const step_plan& plan)
    : signature_(plan.tensors.front().signature),
      options_(detail::make_update_options(plan.options)) {
  const detail::step_tables tables(plan);
  tensors_ = copy_to_device(tables.tensors);
  chunks_ = copy_to_device(tables.chunks);
  table_ = {static_cast<const tensor_descriptor*>(tensors_.get()),
            static_cast<const chunk_descriptor*>(chunks_.get()), tables.chunks.size()};
}

void regular_update::launch(cudaStream_t stream) const {
  STEPGRAPH_CUDA_CHECK(launch_update_by_value(signature_, table_, usual_terms(), options_, stream));
}

}  // namespace stepgraph::perf
