#include "benchmark_problem.hpp"

#include <fmt/format.h>

#include "device_data.hpp"
#include "stepgraph/cuda/check.hpp"

namespace stepgraph::perf {

benchmark_problem::benchmark_problem(const update_signature& signature, std::uint32_t tensors,
                                     std::uint64_t numel)
    : signature_(signature), tensors_(tensors), numel_(numel) {
  STEPGRAPH_CUDA_CHECK(cudaGetDevice(&device_));
  std::uint64_t seed = 1;
  const auto make = [&](operand& target, storage_format format, float low, float high) {
    target.format = format;
    if (format == storage_format::none) return;
    const std::uint64_t elements = tensors_ * numel_;
    target.memory = cuda::allocate_device(elements * element_size(format));
    fill_random(target.memory.get(), format, elements, low, high, seed++);
  };
  make(parameter_, signature.parameter, -1.0f, 1.0f);
  make(gradient_, signature.gradient, -0.01f, 0.01f);
  make(master_, signature.master, -1.0f, 1.0f);
  make(exp_avg_, signature.exp_avg, -0.01f, 0.01f);
  make(exp_avg_sq_, signature.exp_avg_sq, 0.0f, 1e-4f);
  STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
}

tensor_view benchmark_problem::view_of(const operand& source, std::uint32_t tensor) const {
  auto* base = static_cast<std::byte*>(source.memory.get());
  return {base + tensor * numel_ * element_size(source.format),
          numel_,
          source.format,
          {device_kind::cuda, device_}};
}

step_plan benchmark_problem::plan(const step_options& options) const {
  step_builder builder;
  const group_id group =
      builder.add_group({.name = "all", .learning_rate = 1e-4, .weight_decay = 0.01});
  for (std::uint32_t i = 0; i < tensors_; ++i) {
    tensor_operands operands;
    operands.name = fmt::format("tensor {}", i);
    operands.parameter = view_of(parameter_, i);
    operands.gradient = view_of(gradient_, i);
    if (master_.format != storage_format::none) operands.master = view_of(master_, i);
    operands.exp_avg = view_of(exp_avg_, i);
    operands.exp_avg_sq = view_of(exp_avg_sq_, i);
    builder.add_tensor(group, std::move(operands));
  }
  builder.set_options(options);
  return builder.build();
}

void benchmark_problem::launch_pure_stream(cudaStream_t stream) const {
  pure_stream_operands operands;
  const auto add = [&](const operand& source, bool read, bool written) {
    if (source.format == storage_format::none) return;
    operands.entries[operands.count++] = {source.memory.get(),
                                          static_cast<std::uint32_t>(element_size(source.format)),
                                          read, written};
  };
  const bool has_master = master_.format != storage_format::none;
  add(gradient_, true, false);
  add(parameter_, !has_master, true);
  add(master_, true, true);
  add(exp_avg_, true, true);
  add(exp_avg_sq_, true, true);
  STEPGRAPH_CUDA_CHECK(cuda_launch_pure_stream(operands, tensors_ * numel_, stream));
}

std::uint64_t benchmark_problem::bytes() const {
  return tensors_ * numel_ * bytes_per_element(signature_);
}

std::uint64_t memory_of(const update_signature& signature, std::uint32_t tensors,
                        std::uint64_t numel) {
  std::uint64_t per_element = 0;
  for (const storage_format format : {signature.parameter, signature.gradient, signature.master,
                                      signature.exp_avg, signature.exp_avg_sq}) {
    per_element += element_size(format);
  }
  return tensors * numel * per_element;
}

}  // namespace stepgraph::perf
