#include "stepgraph/step_plan.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace stepgraph {

bool measures_gradients(const step_options& options) {
  return skips_non_finite(options) || options.skip_above_norm > 0.0 || options.measure_norm ||
         options.count_zeros || options.exchange_totals;
}

bool skips_non_finite(const step_options& options) {
  return options.skip_non_finite || options.max_grad_norm > 0.0 ||
         options.scaling.rule != loss_scale_rule::fixed;
}

std::uint64_t step_plan::parameter_count() const {
  std::uint64_t count = 0;
  for (const plan_tensor& tensor : tensors) {
    if (!tensor.gradient_only) count += tensor.operands.parameter.numel;
  }
  return count;
}

std::uint64_t step_plan::bytes_read() const {
  std::uint64_t bytes = 0;
  for (const plan_node& node : nodes) bytes += node.bytes_read;
  return bytes;
}

std::uint64_t step_plan::bytes_written() const {
  std::uint64_t bytes = 0;
  for (const plan_node& node : nodes) bytes += node.bytes_written;
  return bytes;
}

std::size_t step_plan::advance_node() const {
  const auto advances = [&](const plan_node& node) {
    return node.kind == node_kind::advance_step ||
           (node.kind == node_kind::grad_stats && !options.exchange_totals);
  };
  return static_cast<std::size_t>(std::find_if(nodes.begin(), nodes.end(), advances) -
                                  nodes.begin());
}

std::string to_dot(const step_plan& plan) {
  std::string dot = "digraph step {\n  rankdir=LR;\n  node [shape=box];\n";
  for (std::size_t i = 0; i < plan.nodes.size(); ++i) {
    const plan_node& node = plan.nodes[i];
    if (node.kind == node_kind::foreign) {
      dot += fmt::format("  n{} [label=\"{}\\nforeign work{}\", shape={}];\n", i, node.name,
                         node.only_if_applied ? "\\nIF applied" : "",
                         node.only_if_applied ? "diamond" : "ellipse");
      continue;
    }
    dot += fmt::format(
        "  n{} [label=\"{}\\n{} tensors, {} blocks x {} threads\\nread {} B, write {} B{}\"];\n", i,
        node.name, node.tensors.size(), node.blocks, node.threads, node.bytes_read,
        node.bytes_written, node.writes_record ? "\\nwrites the record" : "");
  }
  for (const plan_edge& edge : plan.edges) {
    dot += fmt::format("  n{} -> n{} [label=\"{}\"];\n", edge.from, edge.to,
                       edge.programmatic ? "programmatic" : "full");
  }
  dot += "}\n";
  return dot;
}

}  // namespace stepgraph
