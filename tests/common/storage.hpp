#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "stepgraph/kernels/signature.hpp"
#include "stepgraph/math/block_scale.hpp"
#include "stepgraph/math/fp8.hpp"
#include "stepgraph/math/remainder.hpp"
#include "stepgraph/math/rounding.hpp"

/// Stored values as bytes, in whatever format they are.
namespace stepgraph::test {

using operand_bytes = std::vector<std::byte>;

/// Calls `body` with the traits of a format that holds values; not of none and remainder.
template <class Body>
auto with_traits(storage_format format, Body&& body) {
  switch (format) {
    case storage_format::f16:
      return body(math::format_traits<storage_format::f16>{});
    case storage_format::bf16:
      return body(math::format_traits<storage_format::bf16>{});
    case storage_format::e4m3:
      return body(math::format_traits<storage_format::e4m3>{});
    case storage_format::e5m2:
      return body(math::format_traits<storage_format::e5m2>{});
    default:
      return body(math::format_traits<storage_format::f32>{});
  }
}

/// The same for the formats that can be block-scaled.
template <class Body>
auto with_block_format(storage_format format, Body&& body) {
  if (format == storage_format::f16)
    return body(std::integral_constant<storage_format, storage_format::f16>{});
  return body(std::integral_constant<storage_format, storage_format::e4m3>{});
}

/// The bytes of a sequence of values of any trivial type.
template <class Value>
operand_bytes bytes_of(const std::vector<Value>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

/// Rounds f32 values to a format without scales; no bytes for `none`.
inline operand_bytes encode(storage_format format, std::span<const float> values) {
  if (format == storage_format::none) return {};
  return with_traits(format, [&](auto traits) {
    std::vector<typename decltype(traits)::storage> stored(values.size());
    std::transform(values.begin(), values.end(), stored.begin(),
                   [](float value) { return decltype(traits)::encode(value); });
    return bytes_of(stored);
  });
}

/// The f32 values of stored bytes, exactly and without scales.
inline std::vector<float> decode(storage_format format, std::span<const std::byte> bytes) {
  if (format == storage_format::none) return {};
  return with_traits(format, [&](auto traits) {
    typename decltype(traits)::storage stored;
    std::vector<float> values(bytes.size() / sizeof(stored));
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::memcpy(&stored, bytes.data() + i * sizeof(stored), sizeof(stored));
      values[i] = decltype(traits)::decode(stored);
    }
    return values;
  });
}

/// The value that a format would store, as f32.
inline float rounded(storage_format format, float value) {
  return with_traits(format, [value](auto traits) {
    return decltype(traits)::decode(decltype(traits)::encode(value));
  });
}

/// A master or moment: its elements, and its block scales where the format has them.
struct stored_state {
  operand_bytes data;
  operand_bytes scales;
};

/// Stores f32 values as a master or moment; `root` for second moments, which block-scaled formats
/// keep as square roots.
inline stored_state encode_state(storage_format format, bool root, std::span<const float> values) {
  if (!is_block_scaled(format)) return {encode(format, values), {}};
  return with_block_format(format, [&](auto known) {
    using traits = math::format_traits<known.value>;
    std::vector<typename traits::storage> stored(values.size());
    std::vector<std::uint8_t> scales(scale_count(values.size()));
    for (std::size_t first = 0; first < values.size(); first += scale_block_elements) {
      const std::size_t end = std::min<std::size_t>(values.size(), first + scale_block_elements);
      const auto kept = [&](std::size_t i) {
        return root ? math::stored_root(values[i]) : values[i];
      };
      std::uint32_t largest = 0;
      for (std::size_t i = first; i < end; ++i) {
        largest = std::max(largest, math::float_bits(kept(i)) & 0x7fffffffu);
      }
      const std::uint32_t scale = math::block_scale_of<known.value>(largest);
      const float factor = math::inverse_block_factor(scale);
      for (std::size_t i = first; i < end; ++i) {
        stored[i] = traits::encode(root ? math::scaled_root<known.value>(kept(i), factor)
                                        : kept(i) * factor);
      }
      scales[first / scale_block_elements] = static_cast<std::uint8_t>(scale);
    }
    return stored_state{bytes_of(stored), bytes_of(scales)};
  });
}

/// The f32 values of a master or moment.
inline std::vector<float> decode_state(storage_format format, bool root,
                                       std::span<const std::byte> data,
                                       std::span<const std::byte> scales) {
  std::vector<float> values = decode(format, data);
  if (!is_block_scaled(format)) return values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] *= math::block_factor(static_cast<std::uint32_t>(scales[i / scale_block_elements]));
    if (root) values[i] *= values[i];
  }
  return values;
}

/// The whole table of formats: every supported signature, in a fixed order.
inline std::vector<update_signature> supported_signatures() {
  constexpr std::array formats = {
      storage_format::none, storage_format::f32,  storage_format::f16,      storage_format::bf16,
      storage_format::e4m3, storage_format::e5m2, storage_format::remainder};
  std::vector<update_signature> supported;
  for (const storage_format parameter : formats) {
    for (const storage_format gradient : formats) {
      for (const storage_format master : formats) {
        for (const storage_format exp_avg : formats) {
          for (const storage_format exp_avg_sq : formats) {
            for (const storage_format maximum : {storage_format::none, exp_avg_sq}) {
              const update_signature signature = {parameter, gradient,   master,
                                                  exp_avg,   exp_avg_sq, maximum};
              if (why_unsupported(signature).empty()) supported.push_back(signature);
            }
          }
        }
      }
    }
  }
  return supported;
}

/// The signatures with a kernel of their own.
inline std::vector<update_signature> tuned_signatures() {
  using enum storage_format;
  return {
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq) \
  update_signature{parameter, gradient, master, exp_avg, exp_avg_sq},
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  };
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
