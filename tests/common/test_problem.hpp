#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/random_operands.hpp"
#include "stepgraph/step_builder.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::test {

/// One tensor of a problem, without its memory.
struct problem_tensor {
  std::string name;
  group_id group = 0;
  std::uint64_t numel = 0;
  update_signature signature;
  /// Elements by which each operand is off a 256-byte boundary.
  std::array<std::uint64_t, operand_count> offsets = {};
};

/// The signature of a gradient without a parameter.
inline constexpr update_signature gradient_alone(storage_format format) {
  using enum storage_format;
  return {none, format, none, none, none};
}
inline constexpr bool is_gradient_alone(const update_signature& signature) {
  return signature.parameter == storage_format::none && signature.master == storage_format::none;
}

/// Which number a step reads from one f32 in the memory of its tensors.
enum class input_kind { found_inf, loss_scale, learning_rate, weight_decay };

struct step_input {
  input_kind kind = input_kind::found_inf;
  group_id group = 0;  ///< of learning_rate and weight_decay
  float value = 0.0f;  ///< at the start
};

/// The same offset for all memory of a tensor.
inline std::array<std::uint64_t, operand_count> all_offset_by(std::uint64_t elements) {
  std::array<std::uint64_t, operand_count> offsets;
  offsets.fill(elements);
  return offsets;
}

/// An optimizer problem that any executor can be given: groups, tensors, options and the contents
/// of every operand, from a seed unless a test fills them in.
struct test_problem {
  std::vector<group_options> groups = {{.name = "group"}};
  std::vector<problem_tensor> tensors;
  step_options options;
  std::vector<step_input> inputs;
  std::vector<operand_set> contents;  ///< of each tensor, at the start

  /// Adds a tensor with random contents from `seed` and the tensor's position.
  void add(problem_tensor tensor, std::uint64_t seed = 1);

  /// Adds a tensor whose elements are all alike, with fresh moments.
  void add_uniform(std::string name, group_id group, std::uint64_t numel,
                   const update_signature& signature, float parameter, float gradient);

  /// The gradient of one tensor at a step, random from the problem's own contents and the step;
  /// multiplied by the loss scale.
  operand_bytes gradient_at(std::size_t tensor, int step) const;

  /// The plan over memory that `place` and `place_input` give.
  using placement = std::function<void*(std::size_t tensor, std::size_t operand)>;
  using input_placement = std::function<const float*(std::size_t input)>;
  step_plan plan(device_location device, const placement& place,
                 const input_placement& place_input) const;
};

/// A problem of one tensor of one group.
test_problem single_tensor_problem(const update_signature& signature, std::uint64_t numel,
                                   const group_options& group = {.name = "group"});

/// One element of p0 = parameter with fresh moments and a constant gradient: the shape of the cases
/// from the field.
test_problem uniform_problem(const group_options& group, float parameter, float gradient,
                             const update_signature& signature = {}, std::uint64_t numel = 1);

/// Element counts around every boundary of the kernels: packs, scale blocks, blocks of threads,
/// chunks, several chunks, none.
inline constexpr std::uint64_t boundary_sizes[] = {0,    1,    3,    4,    5,    7,    8,
                                                   9,    127,  128,  129,  1023, 1024, 1025,
                                                   2047, 2048, 2049, 4095, 4096, 4097, 10000};

}  // namespace stepgraph::test
