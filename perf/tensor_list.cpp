#include "tensor_list.hpp"

#if defined(STEPGRAPH_HAS_PARAMETER_LISTS)
#include "parameter_lists.hpp"
#endif

namespace stepgraph::perf {

tensor_list uniform_list(std::uint32_t tensors, std::uint64_t numel) {
  return {std::to_string(tensors) + "x" + std::to_string(numel),
          std::vector<std::uint64_t>(tensors, numel)};
}

tensor_list one_tensor_groups(std::uint32_t groups) {
  tensor_list list = uniform_list(groups, 4096);
  list.name = std::to_string(groups) + "groups";
  list.group_per_tensor = true;
  return list;
}

tensor_list model_list([[maybe_unused]] const std::string& model) {
  tensor_list list;
#if defined(STEPGRAPH_HAS_PARAMETER_LISTS)
  list.name = model;
  for (const parameter_shape& parameter : parameter_list(model, 0)) {
    list.numels.push_back(parameter.numel());
  }
#endif
  return list;
}

}  // namespace stepgraph::perf
