#pragma once

#include <string>
#include <string_view>

#include "stepgraph/error.hpp"
#include "stepgraph/math/loss_scale.hpp"
#include "stepgraph/math/step_scalars.hpp"
#include "stepgraph/math/storage_format.hpp"
#include "stepgraph/megatron_schedules.hpp"
#include "stepgraph/operand_kind.hpp"
#include "stepgraph/schedule.hpp"
#include "stepgraph/step_builder.hpp"
#include "stepgraph/step_plan.hpp"
#include "stepgraph/torch_schedules.hpp"
#include "stepgraph/update_report.hpp"

/// Enumerations of the core as the strings that Python uses.
namespace stepgraph::python {

template <class Enum>
struct named {
  std::string_view name;
  Enum value;
};

// Every enumeration that crosses: what it is called in messages, and the names of its values.
template <class Enum>
struct names_of;

template <>
struct names_of<storage_format> {
  static constexpr const char* what = "format";
  static constexpr named<storage_format> values[] = {
      {"f32", storage_format::f32},   {"f16", storage_format::f16},
      {"bf16", storage_format::bf16}, {"e4m3", storage_format::e4m3},
      {"e5m2", storage_format::e5m2}, {"remainder", storage_format::remainder}};
};
template <>
struct names_of<operand_kind> {
  static constexpr const char* what = "operand";
  static constexpr named<operand_kind> values[] = {
      {"parameter", operand_kind::parameter},   {"gradient", operand_kind::gradient},
      {"master", operand_kind::master},         {"exp_avg", operand_kind::exp_avg},
      {"exp_avg_sq", operand_kind::exp_avg_sq}, {"max_exp_avg_sq", operand_kind::max_exp_avg_sq}};
};
template <>
struct names_of<node_kind> {
  static constexpr const char* what = "kind";
  static constexpr named<node_kind> values[] = {{"grad_stats", node_kind::grad_stats},
                                                {"advance_step", node_kind::advance_step},
                                                {"update", node_kind::update},
                                                {"scale_gradients", node_kind::scale_gradients},
                                                {"foreign", node_kind::foreign}};
};
template <>
struct names_of<norm_kind> {
  static constexpr const char* what = "norm";
  static constexpr named<norm_kind> values[] = {{"l2", norm_kind::l2},
                                                {"infinity", norm_kind::infinity}};
};
template <>
struct names_of<foreign_order> {
  static constexpr const char* what = "when";
  static constexpr named<foreign_order> values[] = {{"before", foreign_order::before},
                                                    {"after", foreign_order::after}};
};
template <>
struct names_of<loss_scale_rule> {
  static constexpr const char* what = "rule";
  static constexpr named<loss_scale_rule> values[] = {{"fixed", loss_scale_rule::fixed},
                                                      {"torch_amp", loss_scale_rule::torch_amp},
                                                      {"megatron", loss_scale_rule::megatron}};
};
template <>
struct names_of<schedule_clock> {
  static constexpr const char* what = "clock";
  static constexpr named<schedule_clock> values[] = {{"updates", schedule_clock::updates},
                                                     {"samples", schedule_clock::samples}};
};
template <>
struct names_of<schedules::megatron_learning_rate_style> {
  using style = schedules::megatron_learning_rate_style;
  static constexpr const char* what = "style";
  static constexpr named<style> values[] = {{"constant", style::constant},
                                            {"linear", style::linear},
                                            {"cosine", style::cosine},
                                            {"inverse_square_root", style::inverse_square_root},
                                            {"wsd", style::wsd}};
};
template <>
struct names_of<schedules::megatron_wsd_style> {
  using style = schedules::megatron_wsd_style;
  static constexpr const char* what = "wsd_style";
  static constexpr named<style> values[] = {{"linear", style::linear},
                                            {"cosine", style::cosine},
                                            {"exponential", style::exponential},
                                            {"minus_sqrt", style::minus_sqrt}};
};
template <>
struct names_of<schedules::megatron_weight_decay_style> {
  using style = schedules::megatron_weight_decay_style;
  static constexpr const char* what = "style";
  static constexpr named<style> values[] = {
      {"constant", style::constant}, {"linear", style::linear}, {"cosine", style::cosine}};
};
template <>
struct names_of<schedules::anneal_strategy> {
  using strategy = schedules::anneal_strategy;
  static constexpr const char* what = "strategy";
  static constexpr named<strategy> values[] = {{"cos", strategy::cos},
                                               {"linear", strategy::linear}};
};
template <>
struct names_of<update_path> {
  static constexpr const char* what = "ceiling";
  static constexpr named<update_path> values[] = {{"nothing", update_path::nothing},
                                                  {"scalar_write", update_path::scalar_write},
                                                  {"table_write", update_path::table_write},
                                                  {"node_parameters", update_path::node_parameters},
                                                  {"graph_update", update_path::graph_update},
                                                  {"instantiate", update_path::instantiate}};
};

/// Throws usage_error with the names that there are.
template <class Enum>
Enum from_name(std::string_view name) {
  std::string choices;
  for (const named<Enum>& each : names_of<Enum>::values) {
    if (each.name == name) return each.value;
    choices += (choices.empty() ? "'" : ", '") + std::string(each.name) + "'";
  }
  throw usage_error(std::string(names_of<Enum>::what) + " is '" + std::string(name) +
                    "', expected one of " + choices);
}

template <class Enum>
std::string to_name(Enum value) {
  for (const named<Enum>& each : names_of<Enum>::values) {
    if (each.value == value) return std::string(each.name);
  }
  return "unknown";
}

}  // namespace stepgraph::python
