#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stepgraph/step_builder.hpp"

namespace stepgraph::test {

/// Host memory of one f32 tensor and its master, and operands over it for a test to bend.
struct host_tensor {
  explicit host_tensor(std::uint64_t elements = 8)
      : numel(elements),
        parameter(elements, 1.0f),
        gradient(elements, 1.0f),
        master(elements, 1.0f),
        exp_avg(elements, 0.0f),
        exp_avg_sq(elements, 0.0f) {}

  tensor_view view(std::vector<float>& memory) const { return {memory.data(), numel}; }

  /// Operands without master.
  tensor_operands operands(const std::string& name) {
    return {.name = name,
            .parameter = view(parameter),
            .gradient = view(gradient),
            .exp_avg = view(exp_avg),
            .exp_avg_sq = view(exp_avg_sq)};
  }

  std::uint64_t numel;
  std::vector<float> parameter;
  std::vector<float> gradient;
  std::vector<float> master;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
};

}  // namespace stepgraph::test
