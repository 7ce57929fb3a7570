// Compiled once per instruction set with STEPGRAPH_CHUNK_LOOPS naming the exported function.
// Everything else is forced inline or has internal linkage, so that no copy built for a newer
// processor can replace one built for an older.
#include "chunk_loops.hpp"

#include "stepgraph/math/adam.hpp"
#include "stepgraph/math/block_scale.hpp"
#include "stepgraph/math/fp8.hpp"
#include "stepgraph/math/gradient_norm.hpp"
#include "stepgraph/math/remainder.hpp"
#include "stepgraph/math/rounding.hpp"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace stepgraph::host {
namespace {

/// Elements decoded at a time: the operands in f32 stay in the first-level cache. A multiple of
/// scale_block_elements.
constexpr std::uint64_t tile_elements = 512;

/// The elements [first, first + count) of a tensor.
struct tile {
  std::uint64_t first;
  std::uint64_t count;
};

template <storage_format Format>
ALWAYS_INLINE void decode_tile(const void* base, tile part, float factor,
                               float* __restrict values) {
  using traits = math::format_traits<Format>;
  const auto* __restrict stored = static_cast<const typename traits::storage*>(base) + part.first;
  for (std::uint64_t i = 0; i < part.count; ++i) values[i] = traits::decode(stored[i]) * factor;
}

template <storage_format Format>
ALWAYS_INLINE void encode_tile(void* base, tile part, float factor,
                               const float* __restrict values) {
  using traits = math::format_traits<Format>;
  auto* __restrict stored = static_cast<typename traits::storage*>(base) + part.first;
  for (std::uint64_t i = 0; i < part.count; ++i) stored[i] = traits::encode(values[i] * factor);
}

/// The largest magnitude, as f32 bits.
ALWAYS_INLINE std::uint32_t largest_of(const float* __restrict values, std::uint64_t count) {
  float largest = 0.0f;
#pragma omp simd reduction(max : largest)
  for (std::uint64_t i = 0; i < count; ++i) {
    largest = math::larger_magnitude(largest, values[i]);
  }
  return math::float_bits(largest);
}

template <storage_format Format, bool Root>
ALWAYS_INLINE void decode_blocks(const void* base, const std::uint8_t* scales, tile part,
                                 float* __restrict values) {
  for (std::uint64_t at = 0; at < part.count; at += scale_block_elements) {
    const std::uint64_t left = part.count - at;
    const tile block = {part.first + at, left < scale_block_elements ? left : scale_block_elements};
    const float factor = math::block_factor(scales[block.first / scale_block_elements]);
    decode_tile<Format>(base, block, factor, values + at);
  }
  if constexpr (Root) {
    for (std::uint64_t i = 0; i < part.count; ++i) values[i] = values[i] * values[i];
  }
}

template <storage_format Format, bool Root>
ALWAYS_INLINE void encode_blocks(void* base, std::uint8_t* scales, tile part,
                                 const float* __restrict values) {
  using traits = math::format_traits<Format>;
  alignas(64) float root[scale_block_elements];
  for (std::uint64_t at = 0; at < part.count; at += scale_block_elements) {
    const std::uint64_t left = part.count - at;
    const std::uint64_t count = left < scale_block_elements ? left : scale_block_elements;
    const std::uint64_t first = part.first + at;
    for (std::uint64_t i = 0; i < count; ++i) {
      root[i] = Root ? math::stored_root(values[at + i]) : values[at + i];
    }
    const std::uint32_t scale = math::block_scale_of<Format>(largest_of(root, count));
    const float factor = math::inverse_block_factor(scale);
    auto* __restrict stored = static_cast<typename traits::storage*>(base) + first;
    for (std::uint64_t i = 0; i < count; ++i) {
      stored[i] =
          traits::encode(Root ? math::scaled_root<Format>(root[i], factor) : root[i] * factor);
    }
    scales[first / scale_block_elements] = static_cast<std::uint8_t>(scale);
  }
}

/// A tile of a master or moment in f32: the operand's own memory when it is f32, else decoded.
template <bool Root>
ALWAYS_INLINE float* load_state(storage_format format, void* base, const std::uint8_t* scales,
                                tile part, float* scratch) {
  switch (format) {
    case storage_format::f32:
      return static_cast<float*>(base) + part.first;
    case storage_format::f16:
      decode_blocks<storage_format::f16, Root>(base, scales, part, scratch);
      break;
    case storage_format::bf16:
      decode_tile<storage_format::bf16>(base, part, 1.0f, scratch);
      break;
    case storage_format::e4m3:
      decode_blocks<storage_format::e4m3, Root>(base, scales, part, scratch);
      break;
    default:
      break;
  }
  return scratch;
}

/// Stores a tile of a master or moment, unless it already is the operand's own memory.
template <bool Root>
ALWAYS_INLINE void store_state(storage_format format, void* base, std::uint8_t* scales, tile part,
                               const float* values) {
  switch (format) {
    case storage_format::f16:
      encode_blocks<storage_format::f16, Root>(base, scales, part, values);
      break;
    case storage_format::bf16:
      encode_tile<storage_format::bf16>(base, part, 1.0f, values);
      break;
    case storage_format::e4m3:
      encode_blocks<storage_format::e4m3, Root>(base, scales, part, values);
      break;
    default:
      break;
  }
}

/// A tile of a parameter or gradient in f32; `factor` multiplies FP8.
ALWAYS_INLINE float* load_plain(storage_format format, void* base, tile part, float factor,
                                float* scratch) {
  switch (format) {
    case storage_format::f32:
      return static_cast<float*>(base) + part.first;
    case storage_format::f16:
      decode_tile<storage_format::f16>(base, part, 1.0f, scratch);
      break;
    case storage_format::bf16:
      decode_tile<storage_format::bf16>(base, part, 1.0f, scratch);
      break;
    case storage_format::e4m3:
      decode_tile<storage_format::e4m3>(base, part, factor, scratch);
      break;
    case storage_format::e5m2:
      decode_tile<storage_format::e5m2>(base, part, factor, scratch);
      break;
    default:
      break;
  }
  return scratch;
}

ALWAYS_INLINE void store_stochastically(void* base, tile part, const math::rounding_source& source,
                                        const float* __restrict values) {
  auto* __restrict stored = static_cast<std::uint16_t*>(base) + part.first;
  // Tiles start at a multiple of four elements.
  for (std::uint64_t i = 0; i < part.count; i += 4) {
    const math::random_words random = math::random_of(source, (part.first + i) / 4);
    for (std::uint64_t j = 0; j < 4 && i + j < part.count; ++j) {
      stored[i + j] = math::round_stochastically(values[i + j], random.word[j]);
    }
  }
}

ALWAYS_INLINE void store_parameter(const tensor_descriptor& tensor, tile part,
                                   const math::rounding_source& rounding, const float* values) {
  void* base = tensor.parameter;
  switch (tensor.signature.parameter) {
    case storage_format::f32:
      if (values != static_cast<float*>(base) + part.first) {
        encode_tile<storage_format::f32>(base, part, 1.0f, values);
      }
      break;
    case storage_format::f16:
      encode_tile<storage_format::f16>(base, part, 1.0f, values);
      break;
    case storage_format::bf16:
      if (rounding.stochastic && tensor.signature.master == storage_format::none) {
        store_stochastically(base, part, rounding, values);
      } else {
        encode_tile<storage_format::bf16>(base, part, 1.0f, values);
      }
      break;
    case storage_format::e4m3:
      encode_tile<storage_format::e4m3>(base, part, *tensor.parameter_scaling.scale, values);
      break;
    case storage_format::e5m2:
      encode_tile<storage_format::e5m2>(base, part, *tensor.parameter_scaling.scale, values);
      break;
    default:
      break;
  }
}

/// The weights of a tile in f32: the master, where there is one.
ALWAYS_INLINE float* load_weight(const tensor_descriptor& tensor, tile part, float* scratch) {
  if (tensor.signature.master == storage_format::none) {
    const float factor =
        is_fp8(tensor.signature.parameter) ? *tensor.parameter_scaling.scale_inv : 1.0f;
    return load_plain(tensor.signature.parameter, tensor.parameter, part, factor, scratch);
  }
  if (tensor.signature.master == storage_format::remainder) {
    const auto* __restrict high = static_cast<const std::uint16_t*>(tensor.parameter) + part.first;
    const auto* __restrict low = static_cast<const std::uint16_t*>(tensor.master) + part.first;
    for (std::uint64_t i = 0; i < part.count; ++i) {
      scratch[i] = math::join_remainder(high[i], low[i]);
    }
    return scratch;
  }
  return load_state<false>(tensor.signature.master, tensor.master, tensor.master_scales, part,
                           scratch);
}

ALWAYS_INLINE void store_weight(const tensor_descriptor& tensor, tile part,
                                const math::rounding_source& rounding, const float* values) {
  if (tensor.signature.master == storage_format::remainder) {
    auto* __restrict high = static_cast<std::uint16_t*>(tensor.parameter) + part.first;
    auto* __restrict low = static_cast<std::uint16_t*>(tensor.master) + part.first;
    for (std::uint64_t i = 0; i < part.count; ++i) {
      high[i] = math::rounded_parameter(values[i]);
      low[i] = math::remainder_of(values[i]);
    }
    return;
  }
  store_parameter(tensor, part, rounding, values);
  store_state<false>(tensor.signature.master, tensor.master, tensor.master_scales, part, values);
}

template <bool WithMaximum>
ALWAYS_INLINE void update_tile(const math::adam_terms& terms, std::uint64_t count,
                               const float* __restrict gradient, float* __restrict weight,
                               float* __restrict exp_avg, float* __restrict exp_avg_sq,
                               float* __restrict max_exp_avg_sq) {
#pragma omp simd
  for (std::uint64_t i = 0; i < count; ++i) {
    float p = weight[i];
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    float largest = WithMaximum ? max_exp_avg_sq[i] : 0.0f;
    math::adam_update(terms, WithMaximum, gradient[i], p, m, v, largest);
    weight[i] = p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (WithMaximum) max_exp_avg_sq[i] = largest;
  }
}

std::uint32_t update_chunk(const tensor_descriptor& tensor, std::uint64_t begin,
                           std::uint64_t count, const math::adam_terms& terms,
                           const math::rounding_source& rounding) {
  alignas(64) float gradient_scratch[tile_elements];
  alignas(64) float weight_scratch[tile_elements];
  alignas(64) float exp_avg_scratch[tile_elements];
  alignas(64) float exp_avg_sq_scratch[tile_elements];
  alignas(64) float maximum_scratch[tile_elements];
  const update_signature& formats = tensor.signature;
  const bool with_maximum = formats.max_exp_avg_sq != storage_format::none;
  std::uint32_t largest = 0;

  for (std::uint64_t first = begin; first < begin + count; first += tile_elements) {
    const std::uint64_t left = begin + count - first;
    const tile part = {first, left < tile_elements ? left : tile_elements};
    const float* gradient =
        load_plain(formats.gradient, tensor.gradient, part, 1.0f, gradient_scratch);
    float* weight = load_weight(tensor, part, weight_scratch);
    float* exp_avg = load_state<false>(formats.exp_avg, tensor.exp_avg, tensor.exp_avg_scales, part,
                                       exp_avg_scratch);
    float* exp_avg_sq = load_state<true>(formats.exp_avg_sq, tensor.exp_avg_sq,
                                         tensor.exp_avg_sq_scales, part, exp_avg_sq_scratch);
    float* maximum = load_state<true>(formats.max_exp_avg_sq, tensor.max_exp_avg_sq,
                                      tensor.max_exp_avg_sq_scales, part, maximum_scratch);
    if (with_maximum) {
      update_tile<true>(terms, part.count, gradient, weight, exp_avg, exp_avg_sq, maximum);
    } else {
      update_tile<false>(terms, part.count, gradient, weight, exp_avg, exp_avg_sq, maximum);
    }
    if (is_fp8(formats.parameter)) {
      const std::uint32_t largest_of_tile = largest_of(weight, part.count);
      largest = largest_of_tile > largest ? largest_of_tile : largest;
    }
    store_weight(tensor, part, rounding, weight);
    store_state<false>(formats.exp_avg, tensor.exp_avg, tensor.exp_avg_scales, part, exp_avg);
    store_state<true>(formats.exp_avg_sq, tensor.exp_avg_sq, tensor.exp_avg_sq_scales, part,
                      exp_avg_sq);
    store_state<true>(formats.max_exp_avg_sq, tensor.max_exp_avg_sq, tensor.max_exp_avg_sq_scales,
                      part, maximum);
  }
  return largest;
}

/// The part of add_gradients that knows the format; see grad_stats.cu for the order.
template <storage_format Format>
void add_gradients_of(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                      const statistics_options& options, thread_statistics& found) {
  using traits = math::format_traits<Format>;
  constexpr int width = 16 / sizeof(typename traits::storage);
  constexpr int run = static_cast<int>(statistics_threads) * width;
  const auto* __restrict gradient =
      static_cast<const typename traits::storage*>(tensor.gradient) + begin;
  const int elements = static_cast<int>(count);

  if (options.count_zeros) {
    std::uint32_t zeros = 0;
#pragma omp simd reduction(+ : zeros)
    for (int i = 0; i < elements; ++i) zeros += traits::decode(gradient[i]) == 0.0f ? 1u : 0u;
    found.zeros += zeros;
  }
  if (options.norm == norm_kind::infinity) {
    std::uint32_t largest = found.largest;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < elements; ++i) {
      const std::uint32_t magnitude = math::magnitude_bits(traits::decode(gradient[i]));
      largest = magnitude > largest ? magnitude : largest;
    }
    found.largest = largest;
    return;
  }
  alignas(64) double sums[run] = {};
  for (int offset = 0; offset < elements; offset += run) {
    const int length = elements - offset < run ? elements - offset : run;
#pragma omp simd
    for (int i = 0; i < length; ++i) {
      math::add_square(sums[i], traits::decode(gradient[offset + i]));
    }
  }
  for (int thread = 0; thread < static_cast<int>(statistics_threads); ++thread) {
    double* position = sums + thread * width;
    for (int distance = width / 2; distance > 0; distance /= 2) {
      for (int i = 0; i < distance; ++i) position[i] += position[i + distance];
    }
    found.sum[thread] += position[0];
  }
}

/// Calls `body` with the gradient's format as a template argument.
template <class Body>
void with_gradient_format(storage_format format, Body&& body) {
  using enum storage_format;
  switch (format) {
    case f32:
      return body(std::integral_constant<storage_format, f32>{});
    case f16:
      return body(std::integral_constant<storage_format, f16>{});
    case bf16:
      return body(std::integral_constant<storage_format, bf16>{});
    default:
      return;
  }
}

void add_gradients(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                   const statistics_options& options, thread_statistics& found) {
  with_gradient_format(tensor.signature.gradient, [&](auto format) {
    add_gradients_of<format.value>(tensor, begin, count, options, found);
  });
}

void scale_gradients(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                     float factor) {
  with_gradient_format(tensor.signature.gradient, [&](auto format) {
    using traits = math::format_traits<format.value>;
    auto* __restrict gradient = static_cast<typename traits::storage*>(tensor.gradient) + begin;
#pragma omp simd
    for (std::uint64_t i = 0; i < count; ++i) {
      gradient[i] = traits::encode(traits::decode(gradient[i]) * factor);
    }
  });
}

}  // namespace

chunk_loops STEPGRAPH_CHUNK_LOOPS() { return {update_chunk, add_gradients, scale_gradients}; }

}  // namespace stepgraph::host
