#include "bench_cases.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "parameter_lists.hpp"
#include "stepgraph/step_builder.hpp"
#include "text_table.hpp"

namespace stepgraph::cli {
namespace {

struct tensor_list {
  std::string name;
  std::vector<std::uint64_t> numels;
};

tensor_list equal_tensors(std::uint64_t tensors, std::uint64_t numel) {
  return {fmt::format("{} x {}", tensors, grouped(numel)),
          std::vector<std::uint64_t>(tensors, numel)};
}

tensor_list gpt2() {
  tensor_list list{"gpt2-124m", {}};
  for (const parameter_shape& parameter : gpt2_124m_parameters()) {
    list.numels.push_back(parameter.numel());
  }
  return list;
}

/// Of one operand, on the boundary where the next tensor begins.
std::uint64_t padded_bytes(std::uint64_t numel, storage_format format) {
  constexpr std::uint64_t boundary = 256;
  return (numel * element_size(format) + boundary - 1) / boundary * boundary;
}

}  // namespace

std::uint64_t bench_case::memory_bytes() const {
  std::uint64_t bytes = 0;
  for (const std::uint64_t numel : numels) {
    for (const storage_format format : {signature.parameter, signature.gradient, signature.master,
                                        signature.exp_avg, signature.exp_avg_sq}) {
      bytes += padded_bytes(numel, format);
    }
  }
  return bytes;
}

std::vector<bench_case> bench_cases(bool on_gpu) {
  using enum storage_format;
  // The second-level cache of a GPU holds the first list and none of the others.
  const std::vector<tensor_list> lists =
      on_gpu ? std::vector<tensor_list>{equal_tensors(148, 4096), equal_tensors(64, 1 << 20),
                                        gpt2(), equal_tensors(16, 1 << 24)}
             : std::vector<tensor_list>{equal_tensors(148, 4096), equal_tensors(64, 1 << 16),
                                        equal_tensors(16, 1 << 20), gpt2()};
  std::vector<bench_case> cases;
  for (const tensor_list& list : lists) {
    for (const update_signature& signature :
         {update_signature{f32, f32, none, f32, f32}, update_signature{bf16, bf16, f32, f32, f32},
          update_signature{bf16, bf16, none, bf16, bf16}}) {
      for (const bool whole_step : {false, true}) {
        cases.push_back({list.name, list.numels, signature, whole_step});
      }
    }
  }
  return cases;
}

step_plan plan_of(const bench_case& measured, device_location device,
                  const operand_allocator& allocate) {
  step_builder builder;
  const group_id group = builder.add_group({.learning_rate = 1e-3, .weight_decay = 0.01});
  // One block of memory an operand, so that the tensors lie as a framework's pool lays them.
  const auto block_of = [&](storage_format format) {
    std::uint64_t bytes = 0;
    for (const std::uint64_t numel : measured.numels) bytes += padded_bytes(numel, format);
    return static_cast<std::byte*>(bytes == 0 ? nullptr : allocate(bytes));
  };
  const update_signature& signature = measured.signature;
  std::byte* parameters = block_of(signature.parameter);
  std::byte* gradients = block_of(signature.gradient);
  std::byte* masters = block_of(signature.master);
  std::byte* exp_avgs = block_of(signature.exp_avg);
  std::byte* exp_avg_sqs = block_of(signature.exp_avg_sq);
  for (std::size_t i = 0; i < measured.numels.size(); ++i) {
    const std::uint64_t numel = measured.numels[i];
    const auto take = [&](std::byte*& next, storage_format format) {
      const tensor_view view{.data = next, .numel = numel, .format = format, .device = device};
      next += padded_bytes(numel, format);
      return view;
    };
    tensor_operands operands{.name = fmt::format("tensor {}", i),
                             .parameter = take(parameters, signature.parameter),
                             .gradient = take(gradients, signature.gradient),
                             .master = {},
                             .exp_avg = take(exp_avgs, signature.exp_avg),
                             .exp_avg_sq = take(exp_avg_sqs, signature.exp_avg_sq)};
    if (signature.master != storage_format::none) {
      operands.master = take(masters, signature.master);
    }
    builder.add_tensor(group, std::move(operands));
  }
  if (measured.whole_step) builder.set_options({.max_grad_norm = 1.0, .zero_gradients = true});
  return builder.build();
}

double median_of(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

int steps_worth_measuring(double step_us) {
  return static_cast<int>(std::clamp(2000.0 / std::max(step_us, 1.0), 1.0, 1000.0));
}

}  // namespace stepgraph::cli
