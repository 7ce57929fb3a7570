#include "step_tables.hpp"

namespace stepgraph::detail {
namespace {

/// The view, or an empty one.
tensor_view view_of(const std::optional<tensor_view>& view) { return view ? *view : tensor_view{}; }

}  // namespace

step_tables::step_tables(const step_plan& plan) {
  tensors.reserve(plan.tensors.size());
  for (const plan_tensor& tensor : plan.tensors) {
    tensor_descriptor descriptor;
    descriptor.parameter = tensor.operands.parameter.data;
    descriptor.gradient = view_of(tensor.operands.gradient).data;
    descriptor.master = view_of(tensor.operands.master).data;
    descriptor.master_scales = view_of(tensor.operands.master).scales;
    descriptor.exp_avg = tensor.operands.exp_avg.data;
    descriptor.exp_avg_scales = tensor.operands.exp_avg.scales;
    descriptor.exp_avg_sq = tensor.operands.exp_avg_sq.data;
    descriptor.exp_avg_sq_scales = tensor.operands.exp_avg_sq.scales;
    descriptor.max_exp_avg_sq = view_of(tensor.operands.max_exp_avg_sq).data;
    descriptor.max_exp_avg_sq_scales = view_of(tensor.operands.max_exp_avg_sq).scales;
    if (tensor.operands.parameter_scaling) {
      descriptor.parameter_scaling = *tensor.operands.parameter_scaling;
    }
    descriptor.numel = tensor.operands.parameter.numel;
    descriptor.group = tensor.group;
    descriptor.signature = tensor.signature;
    descriptor.vectorizable = all_operands_aligned(descriptor);
    tensors.push_back(descriptor);
  }
  for (const plan_node& node : plan.nodes) {
    // grad_stats runs over the chunks of all updates, which follow it in the same order.
    const std::uint64_t first = node.kind == node_kind::update ? chunks.size() : 0;
    if (node.kind == node_kind::update) {
      for (const tensor_id id : node.tensors) append_chunks(chunks, id, tensors[id].numel);
    }
    node_chunks.push_back({first, node.chunks});
  }
}

void step_tables::rebind(tensor_id tensor, operand_kind operand, void* data, std::uint8_t* scales) {
  tensor_descriptor& descriptor = tensors[tensor];
  switch (operand) {
    case operand_kind::parameter:
      descriptor.parameter = data;
      break;
    case operand_kind::gradient:
      descriptor.gradient = data;
      break;
    case operand_kind::master:
      descriptor.master = data;
      descriptor.master_scales = scales;
      break;
    case operand_kind::exp_avg:
      descriptor.exp_avg = data;
      descriptor.exp_avg_scales = scales;
      break;
    case operand_kind::exp_avg_sq:
      descriptor.exp_avg_sq = data;
      descriptor.exp_avg_sq_scales = scales;
      break;
    case operand_kind::max_exp_avg_sq:
      descriptor.max_exp_avg_sq = data;
      descriptor.max_exp_avg_sq_scales = scales;
      break;
  }
  descriptor.vectorizable = all_operands_aligned(descriptor);
}

tensor_table_view step_tables::view_of_node(std::size_t node, const tensor_descriptor* tensors_at,
                                            const chunk_descriptor* chunks_at,
                                            std::uint32_t* arrivals_at) const {
  const chunk_range& range = node_chunks[node];
  return {tensors_at, chunks_at + range.first, range.count, arrivals_at};
}

step_block_image::step_block_image(const step_plan& plan) {
  step.loss_scale = plan.options.loss_scale;
  step.max_grad_norm = plan.options.max_grad_norm;
  for (const group_options& options : plan.groups) {
    group_settings settings;
    settings.learning_rate = options.learning_rate;
    settings.weight_decay = options.weight_decay;
    settings.beta1 = options.beta1;
    settings.beta2 = options.beta2;
    settings.eps = options.eps;
    settings.flags = 0;
    if (options.mode == weight_decay_mode::decoupled) {
      settings.flags |= group_decoupled_weight_decay;
    }
    if (options.bias_correction) settings.flags |= group_bias_correction;
    if (options.maximize) settings.flags |= group_maximize;
    settings.has_schedule = options.schedule ? 1 : 0;
    if (options.schedule) settings.schedule = *options.schedule;
    groups.push_back(settings);
    progress.push_back({options.step, 0.0});
    scalars.step = scalars.step < options.step ? options.step : scalars.step;
  }
}

update_options make_update_options(const step_options& options) {
  return {options.zero_gradients, options.stochastic_rounding, options.seed};
}

step_status make_status(const step_scalars& scalars, const std::vector<group_progress>& progress) {
  step_status status;
  status.step = scalars.step;
  status.skipped = scalars.skipped;
  status.last_skipped = scalars.skip != 0;
  status.grad_norm = scalars.grad_norm;
  status.loss_scale = static_cast<double>(scalars.loss_scale);
  status.clip_coefficient = static_cast<double>(scalars.clip_coefficient);
  for (const group_progress& group : progress) {
    status.groups.push_back({group.step, group.learning_rate});
  }
  return status;
}

}  // namespace stepgraph::detail
