#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "stepgraph/kernels/signature.hpp"
#include "stepgraph/math/rounding.hpp"

/// Operands as bytes, in whatever format they are stored.
namespace stepgraph::test {

using operand_bytes = std::vector<std::byte>;

namespace detail {

template <storage_format Format>
void encode_as(std::span<const float> values, operand_bytes& bytes) {
  using traits = math::format_traits<Format>;
  bytes.resize(values.size() * sizeof(typename traits::storage));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto stored = traits::encode(values[i]);
    std::memcpy(bytes.data() + i * sizeof(stored), &stored, sizeof(stored));
  }
}

template <storage_format Format>
void decode_as(std::span<const std::byte> bytes, std::vector<float>& values) {
  using traits = math::format_traits<Format>;
  values.resize(bytes.size() / sizeof(typename traits::storage));
  for (std::size_t i = 0; i < values.size(); ++i) {
    typename traits::storage stored;
    std::memcpy(&stored, bytes.data() + i * sizeof(stored), sizeof(stored));
    values[i] = traits::decode(stored);
  }
}

}  // namespace detail

/// Rounds f32 values to a storage format.
inline operand_bytes encode(storage_format format, std::span<const float> values) {
  operand_bytes bytes;
  switch (format) {
    case storage_format::f32:
      detail::encode_as<storage_format::f32>(values, bytes);
      break;
    case storage_format::f16:
      detail::encode_as<storage_format::f16>(values, bytes);
      break;
    case storage_format::bf16:
      detail::encode_as<storage_format::bf16>(values, bytes);
      break;
    case storage_format::none:
      break;
  }
  return bytes;
}

/// The f32 values of stored bytes, exactly.
inline std::vector<float> decode(storage_format format, std::span<const std::byte> bytes) {
  std::vector<float> values;
  switch (format) {
    case storage_format::f32:
      detail::decode_as<storage_format::f32>(bytes, values);
      break;
    case storage_format::f16:
      detail::decode_as<storage_format::f16>(bytes, values);
      break;
    case storage_format::bf16:
      detail::decode_as<storage_format::bf16>(bytes, values);
      break;
    case storage_format::none:
      break;
  }
  return values;
}

/// The value that a format would store, as f32.
inline float rounded(storage_format format, float value) {
  return decode(format, encode(format, std::span(&value, 1))).front();
}

/// Every signature of the formats that exist, supported or not, filtered by `is_supported`.
inline std::vector<update_signature> supported_signatures() {
  constexpr std::array formats = {storage_format::none, storage_format::f32, storage_format::f16,
                                  storage_format::bf16};
  std::vector<update_signature> supported;
  for (const storage_format parameter : formats) {
    for (const storage_format gradient : formats) {
      for (const storage_format master : formats) {
        for (const storage_format exp_avg : formats) {
          for (const storage_format exp_avg_sq : formats) {
            const update_signature signature = {parameter, gradient, master, exp_avg, exp_avg_sq};
            if (is_supported(signature)) supported.push_back(signature);
          }
        }
      }
    }
  }
  return supported;
}

/// A signature as part of a test's name: letters, digits and underscores.
inline std::string test_name(const update_signature& signature) {
  std::string name = name_of(signature);
  for (char& letter : name) {
    if (letter == '/') letter = '_';
  }
  return name;
}

}  // namespace stepgraph::test
