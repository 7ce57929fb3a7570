#pragma once

#include <fmt/format.h>

#include <map>
#include <string>
#include <vector>

#include "stepgraph/error.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::detail {

/// What to call at each node of the plan; empty where the node is the step's own. Throws
/// usage_error, naming it, for foreign work without a callback and for a callback without a place.
template <class Callback>
std::vector<Callback> callbacks_by_node(const step_plan& plan,
                                        const std::map<std::string, Callback>& callbacks) {
  std::vector<Callback> by_node(plan.nodes.size());
  std::size_t used = 0;
  for (std::size_t i = 0; i < plan.nodes.size(); ++i) {
    if (plan.nodes[i].kind != node_kind::foreign) continue;
    const auto found = callbacks.find(plan.nodes[i].name);
    if (found == callbacks.end() || !found->second) {
      throw usage_error(fmt::format("foreign work '{}': the executor was given no callback of it",
                                    plan.nodes[i].name));
    }
    by_node[i] = found->second;
    ++used;
  }
  if (used == callbacks.size()) return by_node;
  for (const auto& [name, callback] : callbacks) {
    bool planned = false;
    for (const plan_node& node : plan.nodes) {
      planned = planned || (node.kind == node_kind::foreign && node.name == name);
    }
    if (planned) continue;
    throw usage_error(
        fmt::format("foreign work '{}': the plan has no place for the callback", name));
  }
  return by_node;
}

/// The reverse: callbacks of a plan's nodes by their names.
template <class Callback>
std::map<std::string, Callback> callbacks_by_name(const step_plan& plan,
                                                  const std::vector<Callback>& by_node) {
  std::map<std::string, Callback> callbacks;
  for (std::size_t i = 0; i < by_node.size(); ++i) {
    if (by_node[i]) callbacks.emplace(plan.nodes[i].name, by_node[i]);
  }
  return callbacks;
}

}  // namespace stepgraph::detail
