// Compiled once per instruction set with STEPGRAPH_CHUNK_LOOPS naming the exported function.
// Everything else is forced inline or has internal linkage, so that no copy built for a newer
// processor can replace one built for an older.
#include "chunk_loops.hpp"

#include "stepgraph/math/adam.hpp"
#include "stepgraph/math/rounding.hpp"
#include "stepgraph/math/sum_of_squares.hpp"

namespace stepgraph::host {
namespace {

/// Elements decoded at a time: five operands of f32 stay in the first-level cache.
constexpr std::uint64_t tile_elements = 512;

template <storage_format Format>
inline __attribute__((always_inline)) void decode_tile(const void* base, std::uint64_t first,
                                                       std::uint64_t count,
                                                       float* __restrict values) {
  using traits = math::format_traits<Format>;
  const auto* __restrict stored = static_cast<const typename traits::storage*>(base) + first;
  for (std::uint64_t i = 0; i < count; ++i) values[i] = traits::decode(stored[i]);
}

template <storage_format Format>
inline __attribute__((always_inline)) void encode_tile(void* base, std::uint64_t first,
                                                       std::uint64_t count,
                                                       const float* __restrict values) {
  using traits = math::format_traits<Format>;
  auto* __restrict stored = static_cast<typename traits::storage*>(base) + first;
  for (std::uint64_t i = 0; i < count; ++i) stored[i] = traits::encode(values[i]);
}

/// A tile of one operand in f32: the operand's own memory when it is f32, else the decoded copy.
inline __attribute__((always_inline)) float* tile_of(storage_format format, void* base,
                                                     std::uint64_t first, std::uint64_t count,
                                                     float* scratch) {
  switch (format) {
    case storage_format::f32:
      return static_cast<float*>(base) + first;
    case storage_format::f16:
      decode_tile<storage_format::f16>(base, first, count, scratch);
      return scratch;
    case storage_format::bf16:
      decode_tile<storage_format::bf16>(base, first, count, scratch);
      return scratch;
    case storage_format::none:
      return nullptr;
  }
  return nullptr;
}

/// Stores a tile unless it already is the operand's own memory.
inline __attribute__((always_inline)) void store_tile(storage_format format, void* base,
                                                      std::uint64_t first, std::uint64_t count,
                                                      const float* values) {
  switch (format) {
    case storage_format::f32:
      if (values != static_cast<float*>(base) + first) {
        encode_tile<storage_format::f32>(base, first, count, values);
      }
      break;
    case storage_format::f16:
      encode_tile<storage_format::f16>(base, first, count, values);
      break;
    case storage_format::bf16:
      encode_tile<storage_format::bf16>(base, first, count, values);
      break;
    case storage_format::none:
      break;
  }
}

inline __attribute__((always_inline)) void update_tile(
    const math::adam_terms& terms, std::uint64_t count, const float* __restrict gradient,
    float* __restrict parameter, float* __restrict exp_avg, float* __restrict exp_avg_sq) {
#pragma omp simd
  for (std::uint64_t i = 0; i < count; ++i) {
    float p = parameter[i];
    float m = exp_avg[i];
    float v = exp_avg_sq[i];
    math::adam_update(terms, gradient[i], p, m, v);
    parameter[i] = p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
  }
}

void update_chunk(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                  const math::adam_terms& terms) {
  alignas(64) float gradient_scratch[tile_elements];
  alignas(64) float parameter_scratch[tile_elements];
  alignas(64) float exp_avg_scratch[tile_elements];
  alignas(64) float exp_avg_sq_scratch[tile_elements];
  const update_signature& formats = tensor.signature;
  const bool has_master = formats.master != storage_format::none;

  for (std::uint64_t first = begin; first < begin + count; first += tile_elements) {
    const std::uint64_t left = begin + count - first;
    const std::uint64_t length = left < tile_elements ? left : tile_elements;
    const float* gradient =
        tile_of(formats.gradient, tensor.gradient, first, length, gradient_scratch);
    // The master, where there is one, is the parameter; the stored parameter is its rounded copy.
    float* parameter =
        has_master ? tile_of(formats.master, tensor.master, first, length, parameter_scratch)
                   : tile_of(formats.parameter, tensor.parameter, first, length, parameter_scratch);
    float* exp_avg = tile_of(formats.exp_avg, tensor.exp_avg, first, length, exp_avg_scratch);
    float* exp_avg_sq =
        tile_of(formats.exp_avg_sq, tensor.exp_avg_sq, first, length, exp_avg_sq_scratch);
    update_tile(terms, length, gradient, parameter, exp_avg, exp_avg_sq);
    store_tile(formats.parameter, tensor.parameter, first, length, parameter);
    store_tile(formats.master, tensor.master, first, length, parameter);
    store_tile(formats.exp_avg, tensor.exp_avg, first, length, exp_avg);
    store_tile(formats.exp_avg_sq, tensor.exp_avg_sq, first, length, exp_avg_sq);
  }
}

/// The part of add_squares that knows the format; see grad_stats.cu for the order.
template <storage_format Format>
std::uint32_t add_squares_of(const tensor_descriptor& tensor, std::uint64_t begin,
                             std::uint64_t count, thread_sums& sums) {
  using traits = math::format_traits<Format>;
  constexpr int width = 16 / sizeof(typename traits::storage);
  constexpr int run = static_cast<int>(statistics_threads) * width;
  const auto* __restrict gradient =
      static_cast<const typename traits::storage*>(tensor.gradient) + begin;

  alignas(64) float small[run] = {};
  alignas(64) float medium[run] = {};
  alignas(64) float large[run] = {};
  std::uint32_t flags = 0;
  const int elements = static_cast<int>(count);
  for (int offset = 0; offset < elements; offset += run) {
    const int length = elements - offset < run ? elements - offset : run;
#pragma omp simd reduction(| : flags)
    for (int i = 0; i < length; ++i) {
      const float value = traits::decode(gradient[offset + i]);
      math::scaled_sum sum{small[i], medium[i], large[i]};
      math::add_square(sum, value);
      small[i] = sum.small;
      medium[i] = sum.medium;
      large[i] = sum.large;
      flags |= math::is_finite(value) ? 0u : 1u;
    }
  }
  const auto fold = [](float* positions, float* per_thread) {
    for (int thread = 0; thread < static_cast<int>(statistics_threads); ++thread) {
      float* position = positions + thread * width;
      for (int distance = width / 2; distance > 0; distance /= 2) {
        for (int i = 0; i < distance; ++i) position[i] += position[i + distance];
      }
      per_thread[thread] += position[0];
    }
  };
  fold(small, sums.small);
  fold(medium, sums.medium);
  fold(large, sums.large);
  return flags;
}

std::uint32_t add_squares(const tensor_descriptor& tensor, std::uint64_t begin, std::uint64_t count,
                          thread_sums& sums) {
  switch (tensor.signature.gradient) {
    case storage_format::f32:
      return add_squares_of<storage_format::f32>(tensor, begin, count, sums);
    case storage_format::f16:
      return add_squares_of<storage_format::f16>(tensor, begin, count, sums);
    case storage_format::bf16:
      return add_squares_of<storage_format::bf16>(tensor, begin, count, sums);
    case storage_format::none:
      break;
  }
  return 0;
}

}  // namespace

chunk_loops STEPGRAPH_CHUNK_LOOPS() { return {update_chunk, add_squares}; }

}  // namespace stepgraph::host
