#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/random_numbers.hpp"
#include "common/storage.hpp"

namespace stepgraph::test {

/// The operands of one tensor in the order of `operand_kind`: parameter, gradient, master, exp_avg,
/// exp_avg_sq. An operand that does not exist has no bytes.
inline constexpr std::size_t operand_count = 5;
using operand_set = std::array<operand_bytes, operand_count>;
inline constexpr std::size_t parameter_operand = 0;
inline constexpr std::size_t gradient_operand = 1;
inline constexpr std::size_t master_operand = 2;
inline constexpr std::size_t exp_avg_operand = 3;
inline constexpr std::size_t exp_avg_sq_operand = 4;

inline std::array<storage_format, operand_count> formats_of(const update_signature& signature) {
  return {signature.parameter, signature.gradient, signature.master, signature.exp_avg,
          signature.exp_avg_sq};
}

/// Random values of ordinary sizes, none of them zero.
inline operand_bytes random_gradient(storage_format format, std::uint64_t numel,
                                     integer_generator& random, float scale = 1.0f) {
  std::vector<float> values(numel);
  for (float& value : values) value = random.signed_value(-7, 1) * scale;
  return encode(format, values);
}

/// Random operands; with a master, the parameter is its rounded copy.
inline operand_set random_operands(const update_signature& signature, std::uint64_t numel,
                                   integer_generator& random) {
  std::vector<float> parameter(numel);
  std::vector<float> exp_avg(numel);
  std::vector<float> exp_avg_sq(numel);
  for (std::uint64_t i = 0; i < numel; ++i) {
    parameter[i] = random.signed_value(-4, 2);
    exp_avg[i] = random.signed_value(-9, -1);
    exp_avg_sq[i] = random.positive_value(-14, -2);
  }
  return {encode(signature.parameter, parameter),
          random_gradient(signature.gradient, numel, random), encode(signature.master, parameter),
          encode(signature.exp_avg, exp_avg), encode(signature.exp_avg_sq, exp_avg_sq)};
}

}  // namespace stepgraph::test
