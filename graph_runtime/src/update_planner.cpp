#include "update_planner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>

namespace stepgraph {

const char* name_of(update_path path) {
  switch (path) {
    case update_path::nothing:
      return "nothing";
    case update_path::scalar_write:
      return "scalar_write";
    case update_path::table_write:
      return "table_write";
    case update_path::node_parameters:
      return "node_parameters";
    case update_path::graph_update:
      return "graph_update";
    case update_path::instantiate:
      return "instantiate";
  }
  return "unknown";
}

namespace detail {
namespace {

bool same(const loss_scaling& a, const loss_scaling& b) {
  return a.rule == b.rule && a.growth_interval == b.growth_interval &&
         a.hysteresis == b.hysteresis && a.growth_factor == b.growth_factor &&
         a.backoff_factor == b.backoff_factor && a.minimum == b.minimum;
}

bool same(const std::vector<chunk_descriptor>& a, const std::vector<chunk_descriptor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.tensor == y.tensor && x.index == y.index;
  });
}

/// Whether the same chunks of the same tensor numbers lie in the same places of the tables.
bool same_layout(const step_tables& a, const step_tables& b) {
  const auto same_range = [](const auto& x, const auto& y) {
    return x.first == y.first && x.count == y.count;
  };
  return a.tensors.size() == b.tensors.size() && same(a.chunks, b.chunks) &&
         same(a.statistics_chunks, b.statistics_chunks) && a.norm_group_ends == b.norm_group_ends &&
         std::equal(a.node_chunks.begin(), a.node_chunks.end(), b.node_chunks.begin(),
                    b.node_chunks.end(), same_range);
}

bool same_edges(const step_plan& a, const step_plan& b) {
  return std::equal(a.edges.begin(), a.edges.end(), b.edges.begin(), b.edges.end(),
                    [](const plan_edge& x, const plan_edge& y) {
                      return x.from == y.from && x.to == y.to && x.programmatic == y.programmatic;
                    });
}

std::vector<std::string> names_of_nodes(const step_plan& plan) {
  std::vector<std::string> names;
  for (const plan_node& node : plan.nodes) {
    names.push_back(
        fmt::format("node '{}'{}", node.name, node.only_if_applied ? " (only if applied)" : ""));
  }
  return names;
}

std::vector<std::string> names_of_edges(const step_plan& plan) {
  std::vector<std::string> names;
  for (const plan_edge& edge : plan.edges) {
    names.push_back(fmt::format("edge '{}' -> '{}'{}", plan.nodes[edge.from].name,
                                plan.nodes[edge.to].name, edge.programmatic ? "" : " (full)"));
  }
  return names;
}

class comparison {
 public:
  comparison(const placed_plan& current, const placed_plan& next)
      : current_(current), next_(next), layout_(same_layout(current.tables, next.tables)) {}

  update_need run() {
    match_groups();
    for (group_id group = 0; group < need_.group_of_next.size(); ++group) compare_group(group);
    compare_schedule_sizes();
    compare_options();
    compare_tensors();
    compare_nodes();
    for (const update_reason& reason : need_.reasons) {
      need_.path = std::max(need_.path, reason.path);
    }
    return std::move(need_);
  }

 private:
  template <class... Arguments>
  void add(update_path path, fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    need_.reasons.push_back({path, fmt::format(format, std::forward<Arguments>(arguments)...)});
  }

  /// A difference that the tensor table carries.
  template <class... Arguments>
  void add_to_table(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    need_.parts.tensors = true;
    add(update_path::table_write, format, std::forward<Arguments>(arguments)...);
  }

  void match_groups() {
    std::map<std::string_view, std::vector<std::uint32_t>> by_name;
    const auto& before = current_.plan.groups;
    for (auto group = static_cast<std::uint32_t>(before.size()); group-- > 0;) {
      by_name[before[group].name].push_back(group);
    }
    bool in_place = true;
    std::vector<bool> kept(before.size(), false);
    for (std::uint32_t group = 0; group < next_.plan.groups.size(); ++group) {
      const std::string& name = next_.plan.groups[group].name;
      const auto found = by_name.find(name);
      if (found == by_name.end() || found->second.empty()) {
        need_.group_of_next.push_back(no_group);
        add(update_path::node_parameters, "group '{}' was added", name);
        continue;
      }
      need_.group_of_next.push_back(found->second.back());
      found->second.pop_back();
      kept[need_.group_of_next.back()] = true;
      in_place = in_place && need_.group_of_next.back() == group;
    }
    bool dropped = false;
    for (std::size_t group = 0; group < kept.size(); ++group) {
      if (kept[group]) continue;
      dropped = true;
      add(update_path::node_parameters, "group '{}' was dropped", before[group].name);
    }
    if (!in_place && !dropped) {
      add(update_path::node_parameters, "the groups are in another order");
    }
  }

  /// A value that a setting carries.
  template <class Value>
  void compare_setting(std::uint32_t group, const std::string& owner, const char* name,
                       const Value& before, const Value& after, setting_field field) {
    if (before == after) return;
    add(update_path::scalar_write, "{}{} changes from {} to {}", owner, name, before, after);
    need_.settings.push_back({group, field, static_cast<double>(after)});
  }

  /// A value that lies in the step's memory but that no setting carries.
  bool compare_option(const std::string& owner, const std::string& name, bool equal) {
    if (!equal) {
      add(update_path::scalar_write, "{}{} changes", owner, name);
      need_.parts.options = true;
    }
    return equal;
  }

  /// A value that an input, a hand or a schedule may give. Whatever the new plan says of it holds
  /// over what was set by hand.
  void compare_scheduled(group_id group, const std::string& owner, const std::string& name,
                         double before, double after,
                         const std::optional<schedule>& before_schedule,
                         const std::optional<schedule>& after_schedule, bool same_input,
                         setting_field field, setting_field resume) {
    bool equal = compare_option(owner, name + "_schedule", before_schedule == after_schedule);
    equal &= compare_option(owner, name + "_input", same_input);
    if (before != after) {
      add(update_path::scalar_write, "{}{} changes from {} to {}", owner, name, before, after);
    } else if (equal) {
      return;
    }
    if (after_schedule) {
      need_.settings.push_back({group, resume, 0.0});
    } else {
      need_.settings.push_back({group, field, after});
    }
  }

  void compare_group(group_id group) {
    if (need_.group_of_next[group] == no_group) return;
    const group_options& before = current_.plan.groups[need_.group_of_next[group]];
    const group_options& after = next_.plan.groups[group];
    const std::string owner = fmt::format("group '{}': ", after.name);
    using enum setting_field;
    compare_scheduled(group, owner, "learning_rate", before.learning_rate, after.learning_rate,
                      before.learning_rate_schedule, after.learning_rate_schedule,
                      before.learning_rate_input == after.learning_rate_input, learning_rate,
                      resume_learning_rate);
    compare_scheduled(group, owner, "weight_decay", before.weight_decay, after.weight_decay,
                      before.weight_decay_schedule, after.weight_decay_schedule,
                      before.weight_decay_input == after.weight_decay_input, weight_decay,
                      resume_weight_decay);
    compare_setting(group, owner, "beta1", before.beta1, after.beta1, beta1);
    compare_setting(group, owner, "beta2", before.beta2, after.beta2, beta2);
    compare_setting(group, owner, "eps", before.eps, after.eps, eps);
    compare_setting(group, owner, "step", before.step, after.step, group_step);
    compare_option(owner, "mode", before.mode == after.mode);
    compare_option(owner, "bias_correction", before.bias_correction == after.bias_correction);
    compare_option(owner, "maximize", before.maximize == after.maximize);
  }

  /// The memory of the schedules is as large as those that the step was built with.
  void compare_schedule_sizes() {
    const step_block_image before(current_.plan);
    const step_block_image after(next_.plan);
    if (before.schedule_segments.size() == after.schedule_segments.size() &&
        before.schedule_table.size() == after.schedule_table.size()) {
      return;
    }
    add(update_path::node_parameters,
        "the schedules take {} segments and {} table entries, until now {} and {}",
        after.schedule_segments.size(), after.schedule_table.size(),
        before.schedule_segments.size(), before.schedule_table.size());
  }

  void compare_options() {
    const step_options& before = current_.plan.options;
    const step_options& after = next_.plan.options;
    using enum setting_field;
    const std::string owner;
    compare_setting(whole_step, owner, "max_grad_norm", before.max_grad_norm, after.max_grad_norm,
                    max_grad_norm);
    compare_setting(whole_step, owner, "skip_above_norm", before.skip_above_norm,
                    after.skip_above_norm, skip_above_norm);
    compare_setting(whole_step, owner, "samples_per_step", before.samples_per_step,
                    after.samples_per_step, samples_per_step);
    compare_setting(whole_step, owner, "loss_scale", before.loss_scale, after.loss_scale,
                    loss_scale);
    if (!compare_option(owner, "scaling", same(before.scaling, after.scaling)) &&
        before.scaling.hysteresis != after.scaling.hysteresis) {
      need_.settings.push_back(
          {whole_step, hysteresis_left, static_cast<double>(after.scaling.hysteresis)});
    }
    compare_option(owner, "skip_non_finite", skips_non_finite(before) == skips_non_finite(after));
    compare_option(owner, "found_inf_input", before.found_inf_input == after.found_inf_input);
    compare_option(owner, "loss_scale_input", before.loss_scale_input == after.loss_scale_input);

    // Arguments of kernels.
    const auto compare_argument = [&](const char* name, bool equal) {
      if (!equal) add(update_path::node_parameters, "{} changes", name);
    };
    compare_argument("norm", before.norm == after.norm);
    compare_argument("count_zeros", before.count_zeros == after.count_zeros);
    compare_argument("zero_gradients", before.zero_gradients == after.zero_gradients);
    compare_argument("unscale_gradients", before.unscale_gradients == after.unscale_gradients);
    compare_argument("stochastic_rounding",
                     before.stochastic_rounding == after.stochastic_rounding);
    compare_argument("seed", before.seed == after.seed);
    compare_argument("exchange_totals", before.exchange_totals == after.exchange_totals);
    compare_argument("record_capacity", before.record_capacity == after.record_capacity);
    if (current_.plan.norm_groups.size() != next_.plan.norm_groups.size()) {
      add(update_path::node_parameters, "{} norm groups become {}",
          current_.plan.norm_groups.size(), next_.plan.norm_groups.size());
    }
  }

  void compare_tensors() {
    std::unordered_map<std::string_view, tensor_id> known;
    const auto& before = current_.plan.tensors;
    const auto& after = next_.plan.tensors;
    for (tensor_id id = 0; id < before.size(); ++id) known.emplace(before[id].operands.name, id);
    bool in_place = true;
    for (tensor_id id = 0; id < after.size(); ++id) {
      const std::string& name = after[id].operands.name;
      const auto found = known.find(name);
      if (found == known.end()) {
        add(update_path::node_parameters, "tensor '{}' was added to group '{}'", name,
            next_.plan.groups[after[id].group].name);
        continue;
      }
      in_place = in_place && found->second == id;
      compare_tensor(found->second, id);
      known.erase(found);
    }
    for (const plan_tensor& tensor : before) {
      if (known.contains(tensor.operands.name)) {
        add(update_path::node_parameters, "tensor '{}' was dropped", tensor.operands.name);
      }
    }
    if (!in_place && known.empty() && before.size() == after.size()) {
      add(update_path::node_parameters, "the tensors are in another order");
    }
    if (!layout_ && before.size() == after.size() && known.empty() && in_place) {
      add(update_path::node_parameters, "the tensors fall into other chunks");
    }
  }

  void compare_tensor(tensor_id before_id, tensor_id id) {
    const tensor_descriptor& before = current_.tensors[before_id];
    const tensor_descriptor& after = next_.tensors[id];
    const std::string& name = next_.plan.tensors[id].operands.name;
    if (before.numel != after.numel) {
      add_to_table("tensor '{}' is resized from {} to {} elements", name, before.numel,
                   after.numel);
    }
    if (before.signature != after.signature) {
      add_to_table("tensor '{}' changes from {} to {}", name, name_of(before.signature),
                   name_of(after.signature));
    }
    if (before.group != need_.group_of_next[after.group]) {
      add_to_table("tensor '{}' goes from group '{}' to '{}'", name,
                   current_.plan.groups[before.group].name, next_.plan.groups[after.group].name);
    }
    for (std::uint32_t i = 0; i < operand_kinds; ++i) {
      const auto operand = static_cast<operand_kind>(i);
      const void* const from = address_in(before, operand);
      const void* const to = address_in(after, operand);
      if (from == to && scales_in(before, operand) == scales_in(after, operand)) continue;
      need_.moved.push_back({id, operand});
      add_to_table("tensor '{}': {} moves from {} to {}", name, name_of(operand), from, to);
    }
    const fp8_scaling& scaling = after.parameter_scaling;
    if (before.parameter_scaling.scale != scaling.scale ||
        before.parameter_scaling.amax != scaling.amax ||
        before.parameter_scaling.scale_inv != scaling.scale_inv) {
      need_.moved.push_back({id, operand_kind::parameter});
      add_to_table("tensor '{}': scaling of the parameter moves", name);
    }
  }

  void compare_nodes() {
    const std::vector<std::string> before = names_of_nodes(current_.plan);
    const std::vector<std::string> after = names_of_nodes(next_.plan);
    const bool same_shape = before.size() == after.size() && same_edges(current_.plan, next_.plan);
    // The same shape with other kernels: only parameters differ.
    const update_path path = same_shape ? update_path::node_parameters : update_path::instantiate;
    const std::size_t known = need_.reasons.size();
    compare_names(path, before, after);
    compare_names(path, names_of_edges(current_.plan), names_of_edges(next_.plan));
    if (!same_shape && need_.reasons.size() == known) {
      add(path, "the nodes are connected in another way");
    }
    if (before != after && need_.reasons.size() == known) {
      add(path, "the nodes are in another order");
    }
  }

  /// Reports names of one list that the other does not have; a name may occur more than once.
  void compare_names(update_path path, std::vector<std::string> before,
                     std::vector<std::string> after) {
    std::sort(before.begin(), before.end());
    std::sort(after.begin(), after.end());
    std::vector<std::string> gone;
    std::vector<std::string> fresh;
    std::set_difference(before.begin(), before.end(), after.begin(), after.end(),
                        std::back_inserter(gone));
    std::set_difference(after.begin(), after.end(), before.begin(), before.end(),
                        std::back_inserter(fresh));
    for (const std::string& name : gone) add(path, "{} goes", name);
    for (const std::string& name : fresh) add(path, "{} appears", name);
  }

  placed_plan current_;
  placed_plan next_;
  bool layout_;
  update_need need_;
};

}  // namespace

update_need plan_update_need(const placed_plan& current, const placed_plan& next) {
  return comparison(current, next).run();
}

std::string reasons_above(const update_need& need, update_path ceiling) {
  constexpr std::size_t shown = 4;
  std::string text;
  std::size_t count = 0;
  for (const update_reason& reason : need.reasons) {
    if (reason.path <= ceiling) continue;
    if (count++ < shown) text += (text.empty() ? "" : ", ") + reason.text;
  }
  if (count > shown) text += fmt::format(" and {} more", count - shown);
  return text;
}

}  // namespace detail
}  // namespace stepgraph
