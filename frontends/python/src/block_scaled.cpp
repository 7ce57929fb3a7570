#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "bindings.hpp"
#include "names.hpp"
#include "stepgraph/math/block_scale.hpp"
#include "stepgraph/math/rounding.hpp"

namespace nb = nanobind;
using namespace nb::literals;

// Conversions of whole states in host memory, for checkpoints and tests: one block at a time with
// the element math of the step.
namespace stepgraph::python {
namespace {

template <storage_format Format>
void encode_block(const float* values, std::uint64_t count, bool root,
                  typename math::format_traits<Format>::storage* stored, std::uint8_t& scale) {
  using traits = math::format_traits<Format>;
  const auto kept = [&](std::uint64_t i) {
    return root ? math::stored_root(values[i]) : values[i];
  };
  float largest = 0.0f;
  for (std::uint64_t i = 0; i < count; ++i) largest = math::larger_magnitude(largest, kept(i));
  const std::uint32_t chosen = math::block_scale_of<Format>(math::float_bits(largest));
  const float factor = math::inverse_block_factor(chosen);
  for (std::uint64_t i = 0; i < count; ++i) {
    stored[i] =
        traits::encode(root ? math::scaled_root<Format>(kept(i), factor) : kept(i) * factor);
  }
  scale = static_cast<std::uint8_t>(chosen);
}

template <storage_format Format>
void decode_block(const typename math::format_traits<Format>::storage* stored, std::uint8_t scale,
                  std::uint64_t count, bool root, float* values) {
  const float factor = math::block_factor(scale);
  for (std::uint64_t i = 0; i < count; ++i) {
    const float value = math::format_traits<Format>::decode(stored[i]) * factor;
    values[i] = root ? value * value : value;
  }
}

/// Calls `convert(first, count)` for each block.
template <class Convert>
void for_each_block(std::uint64_t numel, Convert&& convert) {
  for (std::uint64_t first = 0; first < numel; first += scale_block_elements) {
    convert(first, std::min<std::uint64_t>(scale_block_elements, numel - first));
  }
}

template <storage_format Format>
void encode(const float* values, std::uint64_t numel, bool root, void* memory,
            std::uint8_t* scales) {
  auto* const stored = static_cast<typename math::format_traits<Format>::storage*>(memory);
  for_each_block(numel, [&](std::uint64_t first, std::uint64_t count) {
    encode_block<Format>(values + first, count, root, stored + first,
                         scales[first / scale_block_elements]);
  });
}

template <storage_format Format>
void decode(const void* memory, const std::uint8_t* scales, std::uint64_t numel, bool root,
            float* values) {
  const auto* const stored =
      static_cast<const typename math::format_traits<Format>::storage*>(memory);
  for_each_block(numel, [&](std::uint64_t first, std::uint64_t count) {
    decode_block<Format>(stored + first, scales[first / scale_block_elements], count, root,
                         values + first);
  });
}

storage_format block_scaled_format(const std::string& name) {
  const storage_format format = from_name<storage_format>(name);
  if (is_block_scaled(format)) return format;
  throw usage_error("format is '" + name + "', expected one that is block-scaled: 'f16', 'e4m3'");
}

void check_addresses(std::uint64_t numel, std::uintptr_t values, std::uintptr_t stored,
                     std::uintptr_t scales) {
  if (numel == 0 || (values != 0 && stored != 0 && scales != 0)) return;
  throw usage_error("values, stored and scales: expected addresses of host memory, found 0");
}

void encode_block_scaled(std::uintptr_t values, std::uint64_t numel, const std::string& format,
                         bool second_moment, std::uintptr_t stored, std::uintptr_t scales) {
  const bool half = block_scaled_format(format) == storage_format::f16;
  check_addresses(numel, values, stored, scales);
  const nb::gil_scoped_release gil;
  (half ? encode<storage_format::f16>
        : encode<storage_format::e4m3>)(reinterpret_cast<const float*>(values), numel,
                                        second_moment, reinterpret_cast<void*>(stored),
                                        reinterpret_cast<std::uint8_t*>(scales));
}

void decode_block_scaled(std::uintptr_t stored, std::uintptr_t scales, std::uint64_t numel,
                         const std::string& format, bool second_moment, std::uintptr_t values) {
  const bool half = block_scaled_format(format) == storage_format::f16;
  check_addresses(numel, values, stored, scales);
  const nb::gil_scoped_release gil;
  (half ? decode<storage_format::f16>
        : decode<storage_format::e4m3>)(reinterpret_cast<const void*>(stored),
                                        reinterpret_cast<const std::uint8_t*>(scales), numel,
                                        second_moment, reinterpret_cast<float*>(values));
}

}  // namespace

void bind_block_scaled(nb::module_& module) {
  module.def("encode_block_scaled", &encode_block_scaled, "values"_a, "numel"_a, "format"_a,
             "second_moment"_a, "stored"_a, "scales"_a,
             "Stores `numel` f32 at `values` as a block-scaled 'f16' or 'e4m3' state, second "
             "moments as square roots. Addresses of host memory.");
  module.def("decode_block_scaled", &decode_block_scaled, "stored"_a, "scales"_a, "numel"_a,
             "format"_a, "second_moment"_a, "values"_a, "The reverse.");
  module.def("scale_count", &scale_count, "numel"_a,
             "Block scales of a state of `numel` elements, one byte each.");
}

}  // namespace stepgraph::python
