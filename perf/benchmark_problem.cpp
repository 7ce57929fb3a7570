#include "benchmark_problem.hpp"

#include <fmt/format.h>

#if defined(STEPGRAPH_HAS_CUDA)
#include "stepgraph/cuda/check.hpp"
#endif

namespace stepgraph::perf {
namespace {

/// Every tensor starts at a multiple of a scale block: its operands are aligned to 16 bytes
/// whatever their format.
std::uint64_t padded(std::uint64_t numel) { return scale_count(numel) * scale_block_elements; }

/// Block scales are biased exponents: this one stands for 2^-15, which brings the largest e4m3,
/// 448, to the size of a moment in training, 0.0137.
constexpr std::uint8_t moment_scale = 127 - 15;
constexpr float largest_scaled = 448.0f;

}  // namespace

benchmark_problem::benchmark_problem(const update_signature& signature, const tensor_list& list,
                                     device_location location)
    : signature_(signature),
      location_(location),
      numels_(list.numels),
      group_per_tensor_(list.group_per_tensor) {
  offsets_.push_back(0);
  for (const std::uint64_t numel : numels_) offsets_.push_back(offsets_.back() + padded(numel));
  const std::uint64_t elements = offsets_.back();
  std::uint64_t seed = 1;
  const auto make = [&](operand& target, storage_format format, float low, float high) {
    target.format = format;
    if (format == storage_format::none) return;
    target.memory = random_operand(format, elements, {low, high, seed++}, location);
  };
  /// A master is scaled by 1, so that its values are the parameter's.
  const auto make_state = [&](operand& target, storage_format format, float low, float high,
                              std::uint8_t scale) {
    const bool scaled = is_block_scaled(format);
    const float unit = scale == moment_scale && scaled ? largest_scaled / high : 1.0f;
    make(target, format, low * unit, high * unit);
    if (scaled) target.scales = constant_operand(scale, scale_count(elements), location);
  };
  make(parameter_, signature.parameter, -1.0f, 1.0f);
  if (is_fp8(signature.parameter)) {
    parameter_scaling_ =
        random_operand(storage_format::f32, 3 * numels_.size(), {1.0f, 1.0f, 0}, location);
  }
  make(gradient_, signature.gradient, -0.01f, 0.01f);
  make_state(master_, signature.master, -1.0f, 1.0f, 127);
  make_state(exp_avg_, signature.exp_avg, -0.01f, 0.01f, moment_scale);
  make_state(exp_avg_sq_, signature.exp_avg_sq, 0.0f, 1e-4f, moment_scale);
#if defined(STEPGRAPH_HAS_CUDA)
  if (location.kind == device_kind::cuda) STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
#endif
}

const benchmark_problem::operand& benchmark_problem::operand_of(operand_kind kind) const {
  switch (kind) {
    case operand_kind::parameter:
      return parameter_;
    case operand_kind::gradient:
      return gradient_;
    case operand_kind::master:
      return master_;
    case operand_kind::exp_avg:
      return exp_avg_;
    default:
      return exp_avg_sq_;
  }
}

void* benchmark_problem::address(operand_kind kind, tensor_id tensor) const {
  const operand& source = operand_of(kind);
  return static_cast<std::byte*>(source.memory.get()) +
         offsets_[tensor] * element_size(source.format);
}

tensor_view benchmark_problem::view_of(operand_kind kind, tensor_id tensor) const {
  const operand& source = operand_of(kind);
  auto* scales = static_cast<std::uint8_t*>(source.scales.get());
  if (scales != nullptr) scales += offsets_[tensor] / scale_block_elements;
  return {address(kind, tensor), numels_[tensor], source.format, location_, scales};
}

step_plan benchmark_problem::plan(const step_options& options, const group_options& group) const {
  step_builder builder;
  group_id id = 0;
  for (tensor_id i = 0; i < tensor_count(); ++i) {
    if (i == 0 || group_per_tensor_) id = builder.add_group(group);
    tensor_operands operands;
    operands.name = fmt::format("tensor {}", i);
    operands.parameter = view_of(operand_kind::parameter, i);
    operands.gradient = view_of(operand_kind::gradient, i);
    if (master_.format != storage_format::none) {
      operands.master = view_of(operand_kind::master, i);
    }
    operands.exp_avg = view_of(operand_kind::exp_avg, i);
    operands.exp_avg_sq = view_of(operand_kind::exp_avg_sq, i);
    if (is_fp8(parameter_.format)) {
      auto* scaling = static_cast<float*>(parameter_scaling_.get()) + 3 * std::size_t{i};
      operands.parameter_scaling = fp8_scaling{scaling, scaling + 1, scaling + 2};
    }
    builder.add_tensor(id, std::move(operands));
  }
  builder.set_options(options);
  return builder.build();
}

#if defined(STEPGRAPH_HAS_CUDA)
pure_stream benchmark_problem::stream_limit(cudaStream_t stream) const {
  stream_addresses addresses;
  addresses[stream_operand::gradient] = gradient_.memory.get();
  addresses[stream_operand::parameter] = parameter_.memory.get();
  addresses[stream_operand::master] = master_.memory.get();
  addresses[stream_operand::exp_avg] = exp_avg_.memory.get();
  addresses[stream_operand::exp_avg_sq] = exp_avg_sq_.memory.get();
  addresses[stream_operand::master_scales] = master_.scales.get();
  addresses[stream_operand::exp_avg_scales] = exp_avg_.scales.get();
  addresses[stream_operand::exp_avg_sq_scales] = exp_avg_sq_.scales.get();
  return {signature_, addresses, offsets_.back(), stream};
}
#endif

std::uint64_t memory_of(const update_signature& signature, const tensor_list& list) {
  std::uint64_t per_element = 0;
  for (const storage_format format : {signature.parameter, signature.gradient, signature.master,
                                      signature.exp_avg, signature.exp_avg_sq}) {
    per_element += element_size(format);
  }
  std::uint64_t elements = 0;
  for (const std::uint64_t numel : list.numels) elements += padded(numel);
  return elements * per_element;
}

}  // namespace stepgraph::perf
