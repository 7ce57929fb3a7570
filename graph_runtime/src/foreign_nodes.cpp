#include "foreign_nodes.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "stepgraph/error.hpp"

namespace stepgraph::detail {
namespace {

/// A name that nodes of the step have, in this plan or in another.
bool is_name_of_the_step(const std::string& name) {
  return name == "grad_stats" || name == "advance_step" || name == "scale_gradients" ||
         name.starts_with("update/");
}

void check_node_exists(const step_plan& plan, const foreign_node& work) {
  std::string names;
  for (const plan_node& node : plan.nodes) {
    if (node.name == work.node) return;
    names += (names.empty() ? "" : ", ") + node.name;
  }
  throw usage_error(fmt::format("foreign work '{}': the step has no node '{}', expected one of: {}",
                                work.name, work.node, names));
}

plan_node node_of(const foreign_node& work) {
  plan_node node;
  node.kind = node_kind::foreign;
  node.name = work.name;
  node.only_if_applied = work.only_if_applied;
  return node;
}

}  // namespace

void check_foreign_node(const foreign_node& work, const std::vector<foreign_node>& others) {
  if (work.name.empty()) throw usage_error("foreign work needs a name");
  const bool taken = is_name_of_the_step(work.name) ||
                     std::any_of(others.begin(), others.end(), [&](const foreign_node& other) {
                       return other.name == work.name;
                     });
  if (taken) throw usage_error(fmt::format("foreign work '{}': the name is taken", work.name));
}

void place_foreign_nodes(step_plan& plan, const std::vector<foreign_node>& works) {
  for (const foreign_node& work : works) check_node_exists(plan, work);
  const std::string advance = plan.nodes[plan.advance_node()].name;
  bool advanced = false;
  std::vector<plan_node> placed;
  const auto place = [&](const std::string& node, foreign_order when) {
    for (const foreign_node& work : works) {
      if (work.node != node || work.when != when) continue;
      if (work.only_if_applied && !advanced) {
        throw usage_error(fmt::format(
            "foreign work '{}': only_if_applied {} '{}', where nobody knows yet whether "
            "the step is applied; expected a place after '{}'",
            work.name, when == foreign_order::before ? "before" : "after", node, advance));
      }
      placed.push_back(node_of(work));
    }
  };
  for (plan_node& node : plan.nodes) {
    const std::string name = node.name;
    place(name, foreign_order::before);
    placed.push_back(std::move(node));
    advanced = advanced || name == advance;
    place(name, foreign_order::after);
  }
  plan.nodes = std::move(placed);
}

}  // namespace stepgraph::detail
