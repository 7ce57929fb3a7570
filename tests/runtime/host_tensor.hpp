#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stepgraph/step_builder.hpp"

namespace stepgraph::test {

/// Host memory of one f32 tensor and what other formats would need, and operands over it for a test
/// to bend.
struct host_tensor {
  explicit host_tensor(std::uint64_t elements = 8)
      : numel(elements),
        parameter(elements, 1.0f),
        gradient(elements, 1.0f),
        master(elements, 1.0f),
        exp_avg(elements, 0.0f),
        exp_avg_sq(elements, 0.0f),
        scales(scale_count(elements), 127) {}

  tensor_view view(std::vector<float>& memory) const { return {memory.data(), numel}; }

  /// Operands without master.
  tensor_operands operands(const std::string& name) {
    return {.name = name,
            .parameter = view(parameter),
            .gradient = view(gradient),
            .exp_avg = view(exp_avg),
            .exp_avg_sq = view(exp_avg_sq)};
  }

  fp8_scaling scaling() {
    return {scale_numbers.data(), scale_numbers.data() + 1, scale_numbers.data() + 2};
  }

  std::uint64_t numel;
  std::vector<float> parameter;
  std::vector<float> gradient;
  std::vector<float> master;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  std::vector<std::uint8_t> scales;                       ///< of one operand
  std::vector<float> scale_numbers = {1.0f, 0.0f, 1.0f};  ///< scale, amax, scale_inv
};

}  // namespace stepgraph::test
