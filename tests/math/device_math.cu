#include "../../kernels/src/pair_conversions.cuh"
#include "math/device_math.hpp"
#include "stepgraph/math/remainder.hpp"
#include "stepgraph/math/restricted.hpp"

namespace stepgraph::test {
namespace {

__device__ std::uint32_t this_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

template <storage_format Format>
__global__ void encode_kernel(conversion by, std::uint32_t stride, std::uint16_t* codes,
                              std::uint32_t count) {
  const std::uint32_t i = this_thread();
  if (i >= count) return;
  const auto value = [&](std::uint32_t index) { return math::bits_to_float(index * stride); };
  if (by == conversion::single) {
    codes[i] = math::format_traits<Format>::encode(value(i));
    return;
  }
  const std::uint32_t pack = i & ~3u;
  const cuda::stored_bits<4> bits = cuda::encode_pack<Format>(
      cuda::float_pack<4>{value(pack), value(pack + 1), value(pack + 2), value(pack + 3)});
  codes[i] = cuda::element_of<cuda::bits_of<Format>>(bits, static_cast<int>(i - pack));
}

template <storage_format Format>
__global__ void decode_kernel(conversion by, std::uint32_t* bits, std::uint32_t count) {
  using storage = typename math::format_traits<Format>::storage;
  const std::uint32_t code = this_thread();
  if (code >= count) return;
  if (by == conversion::single) {
    bits[code] = math::float_bits(math::format_traits<Format>::decode(static_cast<storage>(code)));
    return;
  }
  const std::uint32_t pack = code & ~3u;
  cuda::stored_bits<4> stored;
  for (std::uint32_t i = 0; i < 4; ++i) {
    cuda::set_element<cuda::bits_of<Format>>(stored, static_cast<int>(i),
                                             static_cast<storage>(pack + i));
  }
  bits[code] = math::float_bits(cuda::decode_pack<Format>(stored).value[code - pack]);
}

__global__ void apply_kernel(element_function function, std::uint32_t first, float* results,
                             std::uint32_t count) {
  const std::uint32_t i = this_thread();
  if (i >= count) return;
  const float x = math::bits_to_float(first + i);
  results[i] = function == element_function::restricted_square_root
                   ? math::restricted_square_root(x)
                   : math::restricted_reciprocal(x);
}

__global__ void remainder_kernel(unsigned long long* changed) {
  constexpr std::uint32_t patterns = 256;  // of each thread
  unsigned long long mine = 0;
  for (std::uint32_t i = 0; i < patterns; ++i) {
    const std::uint32_t bits = this_thread() * patterns + i;
    const float master = math::bits_to_float(bits);
    const float joined =
        math::join_remainder(math::rounded_parameter(master), math::remainder_of(master));
    mine += math::float_bits(joined) != bits ? 1 : 0;
  }
  if (mine != 0) atomicAdd(changed, mine);
}

/// Calls `body` with a narrow format as a constant.
template <class Body>
cudaError_t with_format(storage_format format, Body&& body) {
  using enum storage_format;
  switch (format) {
    case f16:
      body(std::integral_constant<storage_format, f16>{});
      break;
    case bf16:
      body(std::integral_constant<storage_format, bf16>{});
      break;
    case e4m3:
      body(std::integral_constant<storage_format, e4m3>{});
      break;
    case e5m2:
      body(std::integral_constant<storage_format, e5m2>{});
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

constexpr std::uint32_t threads = 256;

std::uint32_t blocks_of(std::uint32_t count) { return (count + threads - 1) / threads; }

}  // namespace

cudaError_t encode_on_device(storage_format format, conversion by, std::uint32_t stride,
                             std::uint16_t* codes, std::uint32_t count) {
  return with_format(format, [&](auto known) {
    encode_kernel<known.value><<<blocks_of(count), threads>>>(by, stride, codes, count);
  });
}

cudaError_t decode_on_device(storage_format format, conversion by, std::uint32_t* bits,
                             std::uint32_t count) {
  return with_format(format, [&](auto known) {
    decode_kernel<known.value><<<blocks_of(count), threads>>>(by, bits, count);
  });
}

cudaError_t apply_on_device(element_function function, std::uint32_t first, float* results,
                            std::uint32_t count) {
  apply_kernel<<<blocks_of(count), threads>>>(function, first, results, count);
  return cudaGetLastError();
}

cudaError_t count_changed_by_remainder(unsigned long long* changed) {
  remainder_kernel<<<65536, 256>>>(changed);
  return cudaGetLastError();
}

}  // namespace stepgraph::test
