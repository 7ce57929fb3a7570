#include "step_executable.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::cuda {
namespace {

/// Whether every node is a kernel that a node of the plan became: then parameters are all that can
/// differ between two graphs of one shape.
bool holds_kernels_alone(const step_graph& graph) {
  std::size_t count = 0;
  STEPGRAPH_CUDA_CHECK(cudaGraphGetNodes(graph.get(), nullptr, &count));
  if (count != graph.nodes().size()) return false;
  return std::all_of(graph.nodes().begin(), graph.nodes().end(), [](cudaGraphNode_t node) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    if (node != nullptr) STEPGRAPH_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    return type == cudaGraphNodeTypeKernel;
  });
}

const char* text_of(cudaGraphExecUpdateResult result) {
  switch (result) {
    case cudaGraphExecUpdateSuccess:
      return "no reason given";
    case cudaGraphExecUpdateErrorTopologyChanged:
      return "the topology changed";
    case cudaGraphExecUpdateErrorNodeTypeChanged:
      return "the type of a node changed";
    case cudaGraphExecUpdateErrorFunctionChanged:
    case cudaGraphExecUpdateErrorUnsupportedFunctionChange:
      return "the function of a kernel changed";
    case cudaGraphExecUpdateErrorParametersChanged:
      return "the parameters of a node changed in a way that is not supported";
    case cudaGraphExecUpdateErrorNotSupported:
      return "a node cannot be updated";
    case cudaGraphExecUpdateErrorAttributesChanged:
      return "the attributes of a node changed";
    case cudaGraphExecUpdateError:
      break;
  }
  return "an unexpected error";
}

std::string name_of(cudaGraphNode_t node, const step_graph& graph, const step_plan& plan) {
  const auto found = std::find(graph.nodes().begin(), graph.nodes().end(), node);
  if (found == graph.nodes().end()) return "a node beside the plan's own";
  return "node '" + plan.nodes[static_cast<std::size_t>(found - graph.nodes().begin())].name + "'";
}

}  // namespace

step_executable::step_executable(std::shared_ptr<const step_graph> graph, settings_carrier carrier,
                                 cudaStream_t stream)
    : graph_(std::move(graph)),
      origin_(graph_),
      executable_(graph_->instantiate()),
      carrier_(std::move(carrier)),
      carrier_node_(carrier_.node()),
      instantiations_(1) {
  STEPGRAPH_CUDA_CHECK(cudaGraphUpload(executable_.get(), stream));
}

void step_executable::launch(cudaStream_t stream) {
  if (!executable_) {
    throw update_error(
        "an update failed and the executable before it could not be restored: update again");
  }
  STEPGRAPH_CUDA_CHECK(cudaGraphLaunch(executable_.get(), stream));
}

void step_executable::write(const settings_batch& settings) {
  if (executable_) carrier_.write(executable_.get(), settings);
}

cudaGraphNode_t step_executable::place_of(cudaGraphNode_t carrier, const step_graph& next) const {
  const std::vector<cudaGraphNode_t>& nodes = next.nodes();
  const std::vector<cudaGraphNode_t>& names = origin_->nodes();
  const auto found = std::find(nodes.begin(), nodes.end(), carrier);
  if (found != nodes.end()) {
    return nodes.size() == names.size() ? names[static_cast<std::size_t>(found - nodes.begin())]
                                        : nullptr;
  }
  // Beside the plan's nodes: good if it was there before.
  return std::find(names.begin(), names.end(), carrier_node_) == names.end() ? carrier_node_
                                                                             : nullptr;
}

bool step_executable::set_nodes(const step_graph& next, const step_plan& plan,
                                update_report& report) {
  for (std::size_t i = 0; i < next.nodes().size(); ++i) {
    cudaKernelNodeParams parameters = {};
    STEPGRAPH_CUDA_CHECK(cudaGraphKernelNodeGetParams(next.nodes()[i], &parameters));
    const cudaError_t status =
        cudaGraphExecKernelNodeSetParams(executable_.get(), origin_->nodes()[i], &parameters);
    if (status != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      report.reasons.push_back(
          fmt::format("the driver refused the parameters of node '{}': {} ({})", plan.nodes[i].name,
                      cudaGetErrorString(status), cudaGetErrorName(status)));
      return false;
    }
    ++report.counts.nodes_updated;
  }
  return true;
}

bool step_executable::update_whole(const step_graph& next, const step_plan& plan,
                                   update_report& report) {
  cudaGraphExecUpdateResultInfo info = {};
  const cudaError_t status = cudaGraphExecUpdate(executable_.get(), next.get(), &info);
  if (status == cudaSuccess) {
    ++report.counts.graph_updates;
    return true;
  }
  static_cast<void>(cudaGetLastError());
  ++report.counts.graph_updates_refused;
  std::string reason =
      fmt::format("the driver refused to update the whole graph: {}", text_of(info.result));
  if (info.errorNode != nullptr) reason += ", at " + name_of(info.errorNode, next, plan);
  if (info.errorFromNode != nullptr) {
    reason += ", by its edge from " + name_of(info.errorFromNode, next, plan);
  }
  report.reasons.push_back(fmt::format("{} ({})", reason, cudaGetErrorName(status)));
  return false;
}

void step_executable::restore() noexcept {
  cudaGraphExecUpdateResultInfo info = {};
  if (cudaGraphExecUpdate(executable_.get(), graph_->get(), &info) == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  // Rather none than one that is half of another plan.
  executable_.reset();
  try {
    executable_ = graph_->instantiate();
  } catch (const error&) {
    return;
  }
  origin_ = graph_;
  carrier_node_ = carrier_.node();
  carrier_.aim_at(carrier_node_);
  ++instantiations_;
}

void step_executable::follow(std::shared_ptr<const step_graph> next, settings_carrier carrier,
                             const step_plan& plan, update_path needed, update_path ceiling,
                             update_report& report) {
  const cudaGraphNode_t carrier_in_place = place_of(carrier.node(), *next);
  const auto take = [&](update_path path, cudaGraphNode_t carrier_node) {
    report.path = path;
    graph_ = std::move(next);
    carrier_ = std::move(carrier);
    carrier_node_ = carrier_node;
    carrier_.aim_at(carrier_node);
  };
  const std::size_t known = report.reasons.size();
  try {
    if (executable_ && needed == update_path::node_parameters) {
      if (!holds_kernels_alone(*graph_) || !holds_kernels_alone(*next)) {
        report.reasons.emplace_back("the graph holds nodes whose parameters are not the step's");
      } else if (carrier_in_place != nullptr && set_nodes(*next, plan, report)) {
        return take(update_path::node_parameters, carrier_in_place);
      }
    }
    if (executable_ && ceiling >= update_path::graph_update && update_whole(*next, plan, report)) {
      if (carrier_in_place != nullptr) return take(update_path::graph_update, carrier_in_place);
      report.reasons.emplace_back(
          "the node that takes values set by hand has no name in the executable");
    }
    if (ceiling < update_path::instantiate) {
      const update_path left = ceiling < update_path::graph_update ? update_path::graph_update
                                                                   : update_path::instantiate;
      std::string reasons;
      for (std::size_t i = known; i < report.reasons.size(); ++i) {
        reasons += (i == known ? "" : ", ") + report.reasons[i];
      }
      throw update_error(fmt::format("the update needs {}, the ceiling is {}: {}",
                                     stepgraph::name_of(left), stepgraph::name_of(ceiling),
                                     reasons));
    }
    unique_graph_exec fresh = next->instantiate();
    executable_ = std::move(fresh);
    origin_ = next;
    ++instantiations_;
    ++report.counts.instantiations;
    take(update_path::instantiate, carrier.node());
  } catch (...) {
    if (executable_) restore();
    throw;
  }
}

}  // namespace stepgraph::cuda
