#include "common/test_problem.hpp"

#include <utility>

namespace stepgraph::test {

void test_problem::add(problem_tensor tensor, std::uint64_t seed) {
  integer_generator random(seed * 1'000'003 + tensors.size());
  contents.push_back(random_operands(tensor.signature, tensor.numel, random));
  if (options.loss_scale != 1.0) {
    contents.back()[gradient_operand] = random_gradient(
        tensor.signature.gradient, tensor.numel, random, static_cast<float>(options.loss_scale));
  }
  tensors.push_back(std::move(tensor));
}

void test_problem::add_uniform(std::string name, group_id group, std::uint64_t numel,
                               const update_signature& signature, float parameter, float gradient) {
  const std::vector<float> zeros(numel, 0.0f);
  const std::vector<float> maximum(signature.max_exp_avg_sq == storage_format::none ? 0 : numel,
                                   0.0f);
  contents.push_back(encode_tensor(signature,
                                   {std::vector<float>(numel, parameter),
                                    std::vector<float>(numel, gradient), zeros, zeros, maximum},
                                   {}));
  tensors.push_back({std::move(name), group, numel, signature});
}

operand_bytes test_problem::gradient_at(std::size_t tensor, int step) const {
  integer_generator random(7919 * (tensor + 1) + static_cast<std::uint64_t>(step));
  return random_gradient(tensors[tensor].signature.gradient, tensors[tensor].numel, random,
                         static_cast<float>(options.loss_scale));
}

step_plan test_problem::plan(device_location device, const placement& place,
                             const input_placement& place_input) const {
  step_options with_inputs = options;
  std::vector<group_options> groups_with_inputs = groups;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const float* const address = place_input(i);
    switch (inputs[i].kind) {
      case input_kind::found_inf:
        with_inputs.found_inf_input = address;
        break;
      case input_kind::loss_scale:
        with_inputs.loss_scale_input = address;
        break;
      case input_kind::learning_rate:
        groups_with_inputs[inputs[i].group].learning_rate_input = address;
        break;
      case input_kind::weight_decay:
        groups_with_inputs[inputs[i].group].weight_decay_input = address;
        break;
    }
  }
  step_builder builder;
  builder.set_options(with_inputs);
  for (const group_options& group : groups_with_inputs) builder.add_group(group);
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const problem_tensor& tensor = tensors[t];
    const auto formats = formats_of(tensor.signature);
    const auto view = [&](std::size_t operand) {
      tensor_view placed = {place(t, operand), tensor.numel, formats[operand], device};
      if (operand >= master_operand && is_block_scaled(formats[operand])) {
        placed.scales = static_cast<std::uint8_t*>(place(t, scales_of(operand)));
      }
      return placed;
    };
    if (is_gradient_alone(tensor.signature)) {
      builder.add_gradient(tensor.group, tensor.name, view(gradient_operand));
      continue;
    }
    tensor_operands operands;
    operands.name = tensor.name;
    operands.parameter = view(parameter_operand);
    operands.gradient = view(gradient_operand);
    if (tensor.signature.master != storage_format::none) operands.master = view(master_operand);
    operands.exp_avg = view(exp_avg_operand);
    operands.exp_avg_sq = view(exp_avg_sq_operand);
    if (tensor.signature.max_exp_avg_sq != storage_format::none) {
      operands.max_exp_avg_sq = view(max_exp_avg_sq_operand);
    }
    if (is_fp8(tensor.signature.parameter)) {
      auto* const scaling = static_cast<float*>(place(t, parameter_scaling_operand));
      operands.parameter_scaling = fp8_scaling{scaling, scaling + 1, scaling + 2};
    }
    builder.add_tensor(tensor.group, std::move(operands));
  }
  return builder.build();
}

test_problem single_tensor_problem(const update_signature& signature, std::uint64_t numel,
                                   const group_options& group) {
  test_problem problem;
  problem.groups = {group};
  problem.add({"tensor", 0, numel, signature});
  return problem;
}

test_problem uniform_problem(const group_options& group, float parameter, float gradient,
                             const update_signature& signature, std::uint64_t numel) {
  test_problem problem;
  problem.groups = {group};
  problem.add_uniform("tensor", 0, numel, signature, parameter, gradient);
  return problem;
}

}  // namespace stepgraph::test
