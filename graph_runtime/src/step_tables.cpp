#include "step_tables.hpp"

#include <algorithm>

#include "statistics_layout.hpp"

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
    const std::uint64_t first = chunks.size();
    if (node.kind == node_kind::update || node.kind == node_kind::scale_gradients) {
      for (const tensor_id id : node.tensors) append_chunks(chunks, id, tensors[id].numel);
    }
    node_chunks.push_back({first, chunks.size() - first});
  }
  place_statistics_chunks(plan);
}

void step_tables::place_statistics_chunks(const step_plan& plan) {
  const auto statistics =
      std::find_if(plan.nodes.begin(), plan.nodes.end(),
                   [](const plan_node& node) { return node.kind == node_kind::grad_stats; });
  if (statistics == plan.nodes.end()) return;
  const bool gradients_alone =
      std::any_of(plan.tensors.begin(), plan.tensors.end(),
                  [](const plan_tensor& tensor) { return tensor.gradient_only; });
  if (plan.norm_groups.size() == 1 && !gradients_alone) {
    norm_group_ends.push_back(statistics_blocks(chunks.size()));
    return;
  }
  std::vector<std::uint64_t> group_chunks(plan.norm_groups.size());
  for (const tensor_id id : statistics->tensors) {
    group_chunks[plan.norm_group_of[plan.tensors[id].group]] += chunk_count(tensors[id].numel);
  }
  const std::uint32_t per_block = statistics_chunks_per_block(group_chunks);
  for (std::uint32_t group = 0; group < plan.norm_groups.size(); ++group) {
    for (const tensor_id id : statistics->tensors) {
      if (plan.norm_group_of[plan.tensors[id].group] != group) continue;
      append_chunks(statistics_chunks, id, tensors[id].numel);
    }
    const std::uint64_t end = filled_up(statistics_chunks.size(), per_block);
    norm_group_ends.push_back(static_cast<std::uint32_t>(end / per_block));
    if (plan.norm_groups.size() > 1) statistics_chunks.resize(end, {no_tensor, 0});
  }
}

std::uint64_t step_tables::statistics_chunk_count() const {
  return statistics_chunks.empty() ? chunks.size() : statistics_chunks.size();
}

const chunk_descriptor* step_tables::statistics_data() const {
  return statistics_chunks.empty() ? chunks.data() : statistics_chunks.data();
}

statistics_table_view step_tables::statistics_view(const tensor_descriptor* tensors_at,
                                                   const chunk_descriptor* chunks_at,
                                                   const std::uint32_t* norm_group_ends_at) const {
  return {tensors_at, chunks_at, statistics_chunk_count(), norm_group_ends_at,
          static_cast<std::uint32_t>(norm_group_ends.size())};
}

operand_slot slot_of(tensor_descriptor& descriptor, operand_kind operand) {
  switch (operand) {
    case operand_kind::gradient:
      return {&descriptor.gradient, nullptr};
    case operand_kind::master:
      return {&descriptor.master, &descriptor.master_scales};
    case operand_kind::exp_avg:
      return {&descriptor.exp_avg, &descriptor.exp_avg_scales};
    case operand_kind::exp_avg_sq:
      return {&descriptor.exp_avg_sq, &descriptor.exp_avg_sq_scales};
    case operand_kind::max_exp_avg_sq:
      return {&descriptor.max_exp_avg_sq, &descriptor.max_exp_avg_sq_scales};
    case operand_kind::parameter:
      break;
  }
  return {&descriptor.parameter, nullptr};
}

void* address_in(const tensor_descriptor& descriptor, operand_kind operand) {
  tensor_descriptor copy = descriptor;
  return *slot_of(copy, operand).data;
}

std::uint8_t* scales_in(const tensor_descriptor& descriptor, operand_kind operand) {
  tensor_descriptor copy = descriptor;
  std::uint8_t** const scales = slot_of(copy, operand).scales;
  return scales == nullptr ? nullptr : *scales;
}

storage_format format_of(const update_signature& signature, operand_kind operand) {
  const storage_format formats[operand_kinds] = {signature.parameter,  signature.gradient,
                                                 signature.master,     signature.exp_avg,
                                                 signature.exp_avg_sq, signature.max_exp_avg_sq};
  return formats[static_cast<std::size_t>(operand)];
}

void step_tables::rebind(tensor_id tensor, operand_kind operand, void* data, std::uint8_t* scales) {
  tensor_descriptor& descriptor = tensors[tensor];
  const operand_slot slot = slot_of(descriptor, operand);
  *slot.data = data;
  if (slot.scales != nullptr) *slot.scales = scales;
  descriptor.vectorizable = all_operands_aligned(descriptor);
}

tensor_table_view step_tables::view_of_node(std::size_t node, const tensor_descriptor* tensors_at,
                                            const chunk_descriptor* chunks_at,
                                            std::uint32_t* arrivals_at) const {
  const chunk_range& range = node_chunks[node];
  return {tensors_at, chunks_at + range.first, range.count, arrivals_at};
}

step_block_image::step_block_image(const step_plan& plan) {
  const step_options& options = plan.options;
  step.max_grad_norm = options.max_grad_norm;
  step.skip_above_norm = options.skip_above_norm;
  step.samples_per_step = options.samples_per_step;
  step.skip_non_finite = skips_non_finite(options) ? 1 : 0;
  step.norm = options.norm;
  step.scaling = options.scaling;
  step.found_inf_input = options.found_inf_input;
  step.loss_scale_input = options.loss_scale_input;
  scalars.next_loss_scale.scale = static_cast<float>(options.loss_scale);
  scalars.next_loss_scale.hysteresis_left = static_cast<std::int32_t>(options.scaling.hysteresis);
  norms.resize(plan.norm_groups.size(), 0.0);
  for (const group_options& group : plan.groups) {
    group_settings settings;
    settings.learning_rate = group.learning_rate;
    settings.weight_decay = group.weight_decay;
    settings.beta1 = group.beta1;
    settings.beta2 = group.beta2;
    settings.eps = group.eps;
    settings.flags = 0;
    if (group.mode == weight_decay_mode::decoupled) {
      settings.flags |= group_decoupled_weight_decay;
    }
    if (group.bias_correction) settings.flags |= group_bias_correction;
    if (group.maximize) settings.flags |= group_maximize;
    settings.learning_rate_schedule = append(group.learning_rate_schedule);
    settings.weight_decay_schedule = append(group.weight_decay_schedule);
    settings.learning_rate_input = group.learning_rate_input;
    settings.weight_decay_input = group.weight_decay_input;
    groups.push_back(settings);
    progress.push_back({group.step, 0.0, 0.0});
    scalars.step = std::max(scalars.step, group.step);
  }
}

schedule_reference step_block_image::append(const std::optional<schedule>& added) {
  schedule_reference reference;
  if (!added) return reference;
  reference.first = static_cast<std::uint32_t>(schedule_segments.size());
  reference.count = static_cast<std::uint32_t>(added->segments.size());
  reference.counts_samples = added->clock == schedule_clock::samples ? 1 : 0;
  for (schedule_segment segment : added->segments) {
    segment.table_offset += schedule_table.size();
    schedule_segments.push_back(segment);
  }
  schedule_table.insert(schedule_table.end(), added->table.begin(), added->table.end());
  return reference;
}

update_options make_update_options(const step_options& options) {
  const gradient_store gradients = options.zero_gradients      ? gradient_store::zero
                                   : options.unscale_gradients ? gradient_store::unscaled
                                                               : gradient_store::keep;
  return {gradients, options.stochastic_rounding, options.seed};
}

statistics_options make_statistics_options(const step_options& options) {
  return {options.norm, options.count_zeros};
}

step_status make_status(const step_scalars& scalars, const std::vector<group_progress>& progress,
                        std::vector<double> norms) {
  step_status status;
  status.step = scalars.step;
  status.skipped = scalars.skipped;
  status.last_skipped = scalars.skip != 0;
  status.grad_norm = scalars.grad_norm;
  status.samples = scalars.samples;
  status.found_inf = scalars.found_inf != 0;
  status.norms = std::move(norms);
  status.zeros = scalars.zeros;
  status.next_loss_scale = scalars.next_loss_scale;
  status.loss_scale = static_cast<double>(scalars.loss_scale);
  status.clip_coefficient = static_cast<double>(scalars.clip_coefficient);
  for (const group_progress& group : progress) {
    status.groups.push_back({group.step, group.learning_rate, group.weight_decay});
  }
  return status;
}

}  // namespace stepgraph::detail
