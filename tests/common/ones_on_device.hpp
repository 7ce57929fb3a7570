#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/cuda_testing.hpp"
#include "stepgraph/step_builder.hpp"

namespace stepgraph::test {

/// One f32 tensor in the current device's memory: parameters and gradients of one, fresh moments.
/// For tests that need the executor itself rather than an adapter.
struct ones_on_device {
  explicit ones_on_device(std::uint64_t elements = 1)
      : numel(elements),
        parameter(std::vector<float>(elements, 1.0f)),
        gradient(std::vector<float>(elements, 1.0f)),
        exp_avg(std::vector<float>(elements, 0.0f)),
        exp_avg_sq(std::vector<float>(elements, 0.0f)) {
    check(cudaGetDevice(&device));
  }

  tensor_operands operands(const std::string& name) const {
    const auto view = [this](const device_buffer<float>& buffer) {
      return tensor_view{buffer.data(), numel, storage_format::f32, {device_kind::cuda, device}};
    };
    return {.name = name,
            .parameter = view(parameter),
            .gradient = view(gradient),
            .exp_avg = view(exp_avg),
            .exp_avg_sq = view(exp_avg_sq)};
  }

  step_plan plan(const group_options& group = {.learning_rate = 0.1},
                 const step_options& options = {}) const {
    step_builder builder;
    builder.set_options(options);
    builder.add_tensor(builder.add_group(group), operands("weight"));
    return builder.build();
  }

  /// Waits for the device.
  double first_parameter() const { return static_cast<double>(parameter.read()[0]); }

  std::uint64_t numel;
  int device = 0;
  device_buffer<float> parameter;
  device_buffer<float> gradient;
  device_buffer<float> exp_avg;
  device_buffer<float> exp_avg_sq;
};

/// The first of the tensor's elements after `tenths` updates by 0.1 each.
inline void expect_updates(const ones_on_device& tensor, double tenths) {
  EXPECT_NEAR(tensor.first_parameter(), 1.0 - 0.1 * tenths, 1e-5);
}

}  // namespace stepgraph::test
