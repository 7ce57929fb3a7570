#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Parameter lists of known models, as names and shapes: what plans, benchmarks and reports are
/// made for without loading a model.
namespace stepgraph {

/// A parameter's name and shape.
struct parameter_shape {
  std::string name;
  std::vector<std::uint64_t> shape;

  std::uint64_t numel() const;
};

/// GPT-2 small, in the order and with the names of its published checkpoint (output head tied to
/// the token embedding): 148 tensors, 124,439,808 parameters.
std::vector<parameter_shape> gpt2_124m_parameters();

/// Llama 3 8B, in the order and with the names of its published checkpoint: 291 tensors,
/// 8,030,261,248 parameters.
std::vector<parameter_shape> llama3_8b_parameters();

/// Many short vectors: `tensors` of 4,096 elements, where launches cost more than memory.
std::vector<parameter_shape> nx4096_parameters(std::uint64_t tensors);

/// The names that `parameter_list` knows: "gpt2-124m", "llama3-8b", "nx4096".
std::vector<std::string> parameter_list_names();

/// The list of that name; empty when there is none. `tensors` is the length of "nx4096" alone.
std::vector<parameter_shape> parameter_list(std::string_view name, std::uint64_t tensors);

}  // namespace stepgraph
