#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/random_numbers.hpp"
#include "common/storage.hpp"

namespace stepgraph::test {

/// All memory of one tensor: the operands in the order of `operand_kind`, then the block scales of
/// those that can have them, then scale, amax and scale_inv of an FP8 parameter. What a signature
/// does not have has no bytes.
inline constexpr std::size_t operand_count = 11;
using operand_set = std::array<operand_bytes, operand_count>;
inline constexpr std::size_t parameter_operand = 0;
inline constexpr std::size_t gradient_operand = 1;
inline constexpr std::size_t master_operand = 2;
inline constexpr std::size_t exp_avg_operand = 3;
inline constexpr std::size_t exp_avg_sq_operand = 4;
inline constexpr std::size_t max_exp_avg_sq_operand = 5;
/// Operands that a user can re-bind: those above.
inline constexpr std::size_t bindable_operands = 6;
inline constexpr std::size_t parameter_scaling_operand = 10;

/// The scales of master_operand to max_exp_avg_sq_operand.
inline constexpr std::size_t scales_of(std::size_t operand) { return operand + 4; }

inline constexpr const char* operand_names[operand_count] = {"parameter",
                                                             "gradient",
                                                             "master",
                                                             "exp_avg",
                                                             "exp_avg_sq",
                                                             "max_exp_avg_sq",
                                                             "scales of master",
                                                             "scales of exp_avg",
                                                             "scales of exp_avg_sq",
                                                             "scales of max_exp_avg_sq",
                                                             "parameter scaling"};

inline std::array<storage_format, bindable_operands> formats_of(const update_signature& signature) {
  return {signature.parameter, signature.gradient,   signature.master,
          signature.exp_avg,   signature.exp_avg_sq, signature.max_exp_avg_sq};
}

/// Bytes of an element of an operand; of a scale, of a scaling number.
inline std::size_t stored_size(const update_signature& signature, std::size_t operand) {
  if (operand < bindable_operands) return element_size(formats_of(signature)[operand]);
  return operand == parameter_scaling_operand ? sizeof(float) : 1;
}

/// Second moments are kept as square roots where they are block-scaled.
inline constexpr bool is_second_moment(std::size_t operand) {
  return operand == exp_avg_sq_operand || operand == max_exp_avg_sq_operand;
}

/// The operand that carries the parameter from step to step.
inline std::size_t carrier_of(const update_signature& signature) {
  return signature.master == storage_format::none ? parameter_operand : master_operand;
}

/// An FP8 parameter's scale, amax and scale_inv.
struct scaling_values {
  float scale = 1.0f;
  float amax = 0.0f;
  float scale_inv = 1.0f;
};

inline scaling_values scaling_of(const operand_set& operands) {
  scaling_values scaling;
  const operand_bytes& bytes = operands[parameter_scaling_operand];
  if (!bytes.empty()) std::memcpy(&scaling, bytes.data(), sizeof(scaling));
  return scaling;
}

/// The contents of a tensor in f32.
struct tensor_values {
  std::vector<float> weight;
  std::vector<float> gradient;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  std::vector<float> max_exp_avg_sq;
};

/// Stores master or parameter and master alike: with a master, the parameter is its rounded copy.
/// An FP8 parameter is multiplied by `factor`.
inline void encode_weight(const update_signature& signature, std::span<const float> weight,
                          float factor, operand_set& operands) {
  if (signature.master == storage_format::remainder) {
    std::vector<std::uint16_t> high(weight.size());
    std::vector<std::uint16_t> low(weight.size());
    std::transform(weight.begin(), weight.end(), high.begin(), math::rounded_parameter);
    std::transform(weight.begin(), weight.end(), low.begin(), math::remainder_of);
    operands[parameter_operand] = bytes_of(high);
    operands[master_operand] = bytes_of(low);
    return;
  }
  std::vector<float> scaled(weight.begin(), weight.end());
  if (is_fp8(signature.parameter)) {
    for (float& value : scaled) value *= factor;
  }
  operands[parameter_operand] = encode(signature.parameter, scaled);
  stored_state master = encode_state(signature.master, false, weight);
  operands[master_operand] = std::move(master.data);
  operands[scales_of(master_operand)] = std::move(master.scales);
}

/// Stores the moments.
inline void encode_moments(const update_signature& signature, const tensor_values& values,
                           operand_set& operands) {
  const auto store = [&](std::size_t operand, const std::vector<float>& moment) {
    stored_state state =
        encode_state(formats_of(signature)[operand], is_second_moment(operand), moment);
    operands[operand] = std::move(state.data);
    operands[scales_of(operand)] = std::move(state.scales);
  };
  store(exp_avg_operand, values.exp_avg);
  store(exp_avg_sq_operand, values.exp_avg_sq);
  store(max_exp_avg_sq_operand, values.max_exp_avg_sq);
}

/// A tensor as it is stored.
inline operand_set encode_tensor(const update_signature& signature, const tensor_values& values,
                                 const scaling_values& scaling) {
  operand_set operands;
  encode_weight(signature, values.weight, 1.0f / scaling.scale_inv, operands);
  operands[gradient_operand] = encode(signature.gradient, values.gradient);
  encode_moments(signature, values, operands);
  if (is_fp8(signature.parameter)) {
    operands[parameter_scaling_operand] = bytes_of(std::vector{scaling});
  }
  return operands;
}

/// The elements of an operand in f32, scales applied; the remainder's are those of its master.
inline std::vector<float> values_of(const update_signature& signature, const operand_set& operands,
                                    std::size_t operand) {
  const storage_format format = formats_of(signature)[operand];
  if (operand == master_operand && format == storage_format::remainder) {
    std::vector<float> values(operands[operand].size() / 2);
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint16_t high = 0;
      std::uint16_t low = 0;
      std::memcpy(&high, operands[parameter_operand].data() + 2 * i, 2);
      std::memcpy(&low, operands[master_operand].data() + 2 * i, 2);
      values[i] = math::join_remainder(high, low);
    }
    return values;
  }
  if (operand >= master_operand) {
    return decode_state(format, is_second_moment(operand), operands[operand],
                        operands[scales_of(operand)]);
  }
  std::vector<float> values = decode(format, operands[operand]);
  if (is_fp8(format)) {
    const float factor = scaling_of(operands).scale_inv;
    for (float& value : values) value *= factor;
  }
  return values;
}

/// Random values of ordinary sizes, none of them zero.
inline operand_bytes random_gradient(storage_format format, std::uint64_t numel,
                                     integer_generator& random, float scale = 1.0f) {
  std::vector<float> values(numel);
  for (float& value : values) value = random.signed_value(-7, 1) * scale;
  return encode(format, values);
}

/// Random operands. An FP8 parameter is about to change its scale.
inline operand_set random_operands(const update_signature& signature, std::uint64_t numel,
                                   integer_generator& random) {
  tensor_values values;
  for (std::uint64_t i = 0; i < numel; ++i) {
    values.weight.push_back(random.signed_value(-4, 2));
    values.exp_avg.push_back(random.signed_value(-9, -1));
    values.exp_avg_sq.push_back(random.positive_value(-14, -2));
    if (signature.max_exp_avg_sq != storage_format::none) {
      values.max_exp_avg_sq.push_back(values.exp_avg_sq.back() * random.positive_value(-1, 1));
    }
  }
  operand_set operands = encode_tensor(signature, values, {72.0f, 0.125f, 1.0f / 50.0f});
  operands[gradient_operand] = random_gradient(signature.gradient, numel, random);
  return operands;
}

}  // namespace stepgraph::test
