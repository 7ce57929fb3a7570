#include "stepgraph/step_builder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "foreign_nodes.hpp"
#include "option_checks.hpp"
#include "statistics_layout.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/kernels/launch_shape.hpp"

namespace stepgraph {
namespace {

/// One operand of a tensor with the word for it.
struct named_view {
  const char* name;
  const tensor_view* view;
};

std::vector<named_view> operands_of(const tensor_operands& tensor) {
  std::vector<named_view> views = {{"parameter", &tensor.parameter},
                                   {"exp_avg", &tensor.exp_avg},
                                   {"exp_avg_sq", &tensor.exp_avg_sq}};
  if (tensor.gradient) views.push_back({"gradient", &*tensor.gradient});
  if (tensor.master) views.push_back({"master", &*tensor.master});
  if (tensor.max_exp_avg_sq) views.push_back({"max_exp_avg_sq", &*tensor.max_exp_avg_sq});
  return views;
}

void check_view(const std::string& tensor, const named_view& operand, const tensor_view& parameter,
                plan_purpose purpose) {
  const tensor_view& view = *operand.view;
  if (view.format == storage_format::none) {
    throw usage_error(fmt::format("tensor '{}': {} has no storage format", tensor, operand.name));
  }
  if (view.numel != parameter.numel) {
    throw usage_error(fmt::format("tensor '{}': {} has {} elements, expected {} as the parameter",
                                  tensor, operand.name, view.numel, parameter.numel));
  }
  if (view.device != parameter.device) {
    throw usage_error(fmt::format("tensor '{}': {} is on {}, expected {} as the parameter", tensor,
                                  operand.name, name_of(view.device), name_of(parameter.device)));
  }
  if (view.numel > std::numeric_limits<std::uint64_t>::max() / 8) {
    throw usage_error(
        fmt::format("tensor '{}': {} elements are more than memory can hold", tensor, view.numel));
  }
  if (purpose == plan_purpose::run) {
    detail::check_address(tensor, operand.name, view.data, view.numel, view.format);
  }
}

/// Block-scaled states need their scales, FP8 parameters their scaling.
void check_scales(const tensor_operands& tensor) {
  if (tensor.parameter.numel == 0) return;
  const auto check_state = [&](const char* name, const tensor_view& view) {
    if (is_block_scaled(view.format) && view.scales == nullptr) {
      throw usage_error(fmt::format("tensor '{}': {} is {} without scales, expected {} scale bytes",
                                    tensor.name, name, name_of(view.format),
                                    scale_count(view.numel)));
    }
  };
  check_state("exp_avg", tensor.exp_avg);
  check_state("exp_avg_sq", tensor.exp_avg_sq);
  if (tensor.master) check_state("master", *tensor.master);
  if (tensor.max_exp_avg_sq) check_state("max_exp_avg_sq", *tensor.max_exp_avg_sq);

  if (!is_fp8(tensor.parameter.format)) return;
  if (!tensor.parameter_scaling) {
    throw usage_error(
        fmt::format("tensor '{}': parameter is {} without scaling, expected scale, "
                    "amax and scale_inv",
                    tensor.name, name_of(tensor.parameter.format)));
  }
  const fp8_scaling& scaling = *tensor.parameter_scaling;
  detail::check_address(tensor.name, "scale", scaling.scale, 1, storage_format::f32);
  detail::check_address(tensor.name, "amax", scaling.amax, 1, storage_format::f32);
  detail::check_address(tensor.name, "scale_inv", scaling.scale_inv, 1, storage_format::f32);
}

update_signature signature_of(const tensor_operands& tensor) {
  update_signature signature;
  signature.parameter = tensor.parameter.format;
  signature.gradient = tensor.gradient->format;
  signature.master = tensor.master ? tensor.master->format : storage_format::none;
  signature.exp_avg = tensor.exp_avg.format;
  signature.exp_avg_sq = tensor.exp_avg_sq.format;
  if (tensor.max_exp_avg_sq) signature.max_exp_avg_sq = tensor.max_exp_avg_sq->format;
  return signature;
}

/// Refuses any two operands that share a byte: the step would read what it also writes, in an
/// order that nobody defines.
void check_overlaps(const std::vector<plan_tensor>& tensors) {
  struct range {
    std::uintptr_t begin;
    std::uintptr_t end;
    const std::string* tensor;
    const char* operand;
  };
  std::vector<range> ranges;
  for (const plan_tensor& tensor : tensors) {
    for (const named_view& operand : operands_of(tensor.operands)) {
      if (operand.view->numel == 0 || operand.view->data == nullptr) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(operand.view->data);
      ranges.push_back({begin, begin + operand.view->numel * element_size(operand.view->format),
                        &tensor.operands.name, operand.name});
      if (operand.view->scales != nullptr) {
        const auto scales = reinterpret_cast<std::uintptr_t>(operand.view->scales);
        ranges.push_back({scales, scales + scale_count(operand.view->numel), &tensor.operands.name,
                          operand.name});
      }
    }
  }
  for (const plan_tensor& tensor : tensors) {
    if (!tensor.operands.parameter_scaling || tensor.operands.parameter.numel == 0) continue;
    const auto add = [&](const float* scalar, const char* name) {
      const auto begin = reinterpret_cast<std::uintptr_t>(scalar);
      ranges.push_back({begin, begin + sizeof(float), &tensor.operands.name, name});
    };
    add(tensor.operands.parameter_scaling->amax, "amax");
    add(tensor.operands.parameter_scaling->scale_inv, "scale_inv");
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const range& a, const range& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[i - 1].end) {
      throw usage_error(fmt::format(
          "tensor '{}': {} shares memory with {} of tensor '{}', expected separate memory",
          *ranges[i].tensor, ranges[i].operand, ranges[i - 1].operand, *ranges[i - 1].tensor));
    }
  }
}

/// Adds the tensors of a node to its sizes.
void add_tensor_to(plan_node& node, tensor_id id, const plan_tensor& tensor,
                   const step_options& options) {
  const std::uint64_t numel = tensor.operands.parameter.numel;
  const std::uint64_t gradient_bytes = numel * element_size(tensor.signature.gradient);
  node.tensors.push_back(id);
  node.chunks += chunk_count(numel);
  if (node.kind != node_kind::update) {
    node.bytes_read += gradient_bytes;
    if (node.kind == node_kind::scale_gradients) node.bytes_written += gradient_bytes;
    return;
  }
  const update_signature& signature = tensor.signature;
  const std::uint64_t scales = block_scaled_operands(signature) * scale_count(numel);
  node.bytes_read += numel * bytes_read_per_element(signature) + scales;
  node.bytes_written += numel * bytes_written_per_element(signature) + scales +
                        (options.zero_gradients || options.unscale_gradients ? gradient_bytes : 0);
}

plan_node node_of(node_kind kind, std::string name) {
  plan_node node;
  node.kind = kind;
  node.name = std::move(name);
  return node;
}

void set_blocks(plan_node& node, std::uint64_t blocks, std::uint32_t threads) {
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    throw usage_error(fmt::format("node '{}': {} chunks are more than one launch can hold",
                                  node.name, node.chunks));
  }
  node.blocks = static_cast<std::uint32_t>(blocks);
  node.threads = threads;
}

/// Gives the step's record to the largest update, which takes longer than the bus does, or to the
/// node that advances the step where nothing is updated. Not to an update after foreign work, which
/// may fail: a step that has advanced has its record.
void place_record(step_plan& plan) {
  const auto advance = plan.nodes.begin() + static_cast<std::ptrdiff_t>(plan.advance_node());
  const auto end = std::find_if(advance, plan.nodes.end(), [](const plan_node& node) {
    return node.kind == node_kind::foreign;
  });
  const auto chunks_updated = [](const plan_node& node) {
    return node.kind == node_kind::update ? node.chunks : 0;
  };
  const auto writer = std::max_element(advance, end, [&](const auto& a, const auto& b) {
    return chunks_updated(a) < chunks_updated(b);
  });
  writer->writes_record = true;
  if (writer->kind == node_kind::update) {
    set_blocks(*writer, std::uint64_t{writer->blocks} + 1, writer->threads);
  }
}

/// Numbers the norm groups in the order in which groups name them.
void name_norm_groups(step_plan& plan) {
  for (const group_options& group : plan.groups) {
    auto name = std::find(plan.norm_groups.begin(), plan.norm_groups.end(), group.norm_group);
    if (name == plan.norm_groups.end()) {
      name = plan.norm_groups.insert(plan.norm_groups.end(), group.norm_group);
    }
    plan.norm_group_of.push_back(static_cast<std::uint32_t>(name - plan.norm_groups.begin()));
  }
  if (plan.norm_groups.empty()) plan.norm_groups.emplace_back();
  if (plan.norm_groups.size() > max_norm_groups) {
    throw usage_error(fmt::format("the groups name {} norm groups, expected at most {}",
                                  plan.norm_groups.size(), max_norm_groups));
  }
}

}  // namespace

group_id step_builder::add_group(group_options options) {
  const auto id = static_cast<group_id>(groups_.size());
  if (options.name.empty()) options.name = fmt::format("group {}", id);
  detail::check_group_options(options);
  groups_.push_back(std::move(options));
  return id;
}

void step_builder::check_place(group_id group, const tensor_operands& operands) const {
  if (group >= groups_.size()) {
    throw usage_error(fmt::format("tensor '{}': group {} does not exist, {} groups were added",
                                  operands.name, group, groups_.size()));
  }
  if (operands.name.empty()) throw usage_error("a tensor needs a name");
  if (names_.contains(operands.name)) {
    throw usage_error(fmt::format("tensor '{}': the name is taken", operands.name));
  }
}

void step_builder::check_same_device(const std::string& name, const tensor_view& view) const {
  if (tensors_.empty()) return;
  const tensor_operands& first = tensors_.front().operands;
  if (first.parameter.device == view.device) return;
  throw usage_error(fmt::format("tensor '{}': is on {}, expected {} as tensor '{}'", name,
                                name_of(view.device), name_of(first.parameter.device), first.name));
}

tensor_id step_builder::add_tensor(group_id group, tensor_operands operands) {
  check_place(group, operands);
  if (!operands.gradient) {
    throw usage_error(fmt::format("tensor '{}': the parameter has no gradient", operands.name));
  }
  for (const named_view& operand : operands_of(operands)) {
    check_view(operands.name, operand, operands.parameter, purpose_);
  }
  check_same_device(operands.name, operands.parameter);
  const update_signature signature = signature_of(operands);
  if (const std::string reason = why_unsupported(signature); !reason.empty()) {
    throw usage_error(fmt::format("tensor '{}': {}", operands.name, reason));
  }
  if (purpose_ == plan_purpose::run) check_scales(operands);
  names_.insert(operands.name);
  tensors_.push_back({std::move(operands), group, signature});
  return static_cast<tensor_id>(tensors_.size() - 1);
}

tensor_id step_builder::add_gradient(group_id group, std::string name, tensor_view gradient) {
  tensor_operands operands;
  operands.name = std::move(name);
  operands.gradient = gradient;
  check_place(group, operands);
  check_view(operands.name, {"gradient", &gradient}, gradient, purpose_);
  using enum storage_format;
  if (gradient.format != f32 && gradient.format != f16 && gradient.format != bf16) {
    throw usage_error(fmt::format("tensor '{}': gradient is {}, expected f32, f16 or bf16",
                                  operands.name, name_of(gradient.format)));
  }
  check_same_device(operands.name, gradient);
  // Sizes and device are where those of other tensors are.
  operands.parameter = {nullptr, gradient.numel, none, gradient.device};
  names_.insert(operands.name);
  update_signature signature;
  signature.parameter = signature.exp_avg = signature.exp_avg_sq = none;
  signature.gradient = gradient.format;
  tensors_.push_back({std::move(operands), group, signature, true});
  return static_cast<tensor_id>(tensors_.size() - 1);
}

void step_builder::add_foreign_work(foreign_node work) {
  detail::check_foreign_node(work, foreign_);
  foreign_.push_back(std::move(work));
}

void step_builder::set_options(const step_options& options) {
  detail::check_step_options(options);
  options_ = options;
}

step_plan step_builder::build() const {
  if (purpose_ == plan_purpose::run) check_overlaps(tensors_);

  step_plan plan;
  plan.options = options_;
  plan.groups = groups_;
  plan.tensors = tensors_;
  plan.shapes_only = purpose_ == plan_purpose::inspect;
  if (!tensors_.empty()) plan.device = tensors_.front().operands.parameter.device;
  name_norm_groups(plan);

  std::vector<plan_node> updates = update_nodes();
  plan_node scaling = node_of(node_kind::scale_gradients, "scale_gradients");
  for (tensor_id id = 0; id < tensors_.size(); ++id) {
    const plan_tensor& tensor = tensors_[id];
    if (!tensor.gradient_only || tensor.operands.parameter.numel == 0) continue;
    add_tensor_to(scaling, id, tensor, options_);
  }
  const bool measured = measures_gradients(options_);
  if (measured) plan.nodes.push_back(statistics_node(updates, scaling, plan));
  if (!measured || options_.exchange_totals) {
    plan_node advance = node_of(node_kind::advance_step, "advance_step");
    advance.blocks = prepare_blocks(group_count());
    advance.threads = advance_step_threads;
    plan.nodes.push_back(std::move(advance));
  }
  if (options_.unscale_gradients && scaling.chunks != 0) {
    set_blocks(scaling, scaling.chunks, statistics_threads);
    plan.nodes.push_back(std::move(scaling));
  }
  for (plan_node& node : updates) {
    set_blocks(node, node.chunks * update_blocks_per_chunk, update_threads);
    plan.nodes.push_back(std::move(node));
  }
  detail::place_foreign_nodes(plan, foreign_);
  if (options_.record_capacity != 0) place_record(plan);
  for (std::uint32_t i = 1; i < plan.nodes.size(); ++i) {
    const bool kernels =
        plan.nodes[i - 1].kind != node_kind::foreign && plan.nodes[i].kind != node_kind::foreign;
    plan.edges.push_back({i - 1, i, kernels});
  }
  return plan;
}

std::vector<plan_node> step_builder::update_nodes() const {
  std::vector<plan_node> updates;
  for (tensor_id id = 0; id < tensors_.size(); ++id) {
    const plan_tensor& tensor = tensors_[id];
    if (tensor.gradient_only || tensor.operands.parameter.numel == 0) continue;
    auto node = std::find_if(updates.begin(), updates.end(), [&](const plan_node& candidate) {
      return candidate.signature == tensor.signature;
    });
    if (node == updates.end()) {
      plan_node fresh = node_of(node_kind::update, "update/" + name_of(tensor.signature));
      fresh.signature = tensor.signature;
      node = updates.insert(updates.end(), std::move(fresh));
    }
    add_tensor_to(*node, id, tensor, options_);
  }
  return updates;
}

plan_node step_builder::statistics_node(const std::vector<plan_node>& updates,
                                        const plan_node& scaling, const step_plan& plan) const {
  plan_node node = node_of(node_kind::grad_stats, "grad_stats");
  for (const plan_node& update : updates) {
    for (const tensor_id id : update.tensors) add_tensor_to(node, id, tensors_[id], options_);
  }
  for (const tensor_id id : scaling.tensors) add_tensor_to(node, id, tensors_[id], options_);
  std::vector<std::uint64_t> group_chunks(plan.norm_groups.size());
  for (const tensor_id id : node.tensors) {
    group_chunks[plan.norm_group_of[tensors_[id].group]] +=
        chunk_count(tensors_[id].operands.parameter.numel);
  }
  // Beside them, those that prepare the step; the first of them also gathers.
  const std::uint32_t advancing = options_.exchange_totals ? 1 : prepare_blocks(group_count());
  set_blocks(node, detail::statistics_blocks_of(group_chunks) + advancing, statistics_threads);
  return node;
}

}  // namespace stepgraph
