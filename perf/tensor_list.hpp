#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stepgraph::perf {

/// The sizes of the tensors of a step.
struct tensor_list {
  std::string name;  ///< as it appears in benchmark names
  std::vector<std::uint64_t> numels;
  bool group_per_tensor = false;  ///< otherwise one group holds them all
};

/// `tensors` tensors of `numel` elements, named "<tensors>x<numel>".
tensor_list uniform_list(std::uint32_t tensors, std::uint64_t numel);

/// `groups` tensors of 4,096 elements, each a group of its own, named "<groups>groups".
tensor_list one_tensor_groups(std::uint32_t groups);

/// The parameters of a model that the command line program knows ("gpt2-124m"). Empty where that
/// program, whose lists these are, is not built.
tensor_list model_list(const std::string& model);

}  // namespace stepgraph::perf
