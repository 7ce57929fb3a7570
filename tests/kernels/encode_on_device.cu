#include "kernels/encode_on_device.hpp"
#include "stepgraph/math/rounding.hpp"

namespace stepgraph::test {
namespace {

template <storage_format Format>
__global__ void encode_kernel(std::uint32_t stride, std::uint16_t* codes, std::uint32_t count) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) codes[i] = math::format_traits<Format>::encode(math::bits_to_float(i * stride));
}

template <storage_format Format>
__global__ void decode_kernel(std::uint32_t* bits) {
  const std::uint32_t code = blockIdx.x * blockDim.x + threadIdx.x;
  bits[code] =
      math::float_bits(math::format_traits<Format>::decode(static_cast<std::uint16_t>(code)));
}

}  // namespace

cudaError_t encode_on_device(storage_format format, std::uint32_t stride, std::uint16_t* codes,
                             std::uint32_t count) {
  const std::uint32_t blocks = (count + 255) / 256;
  if (format == storage_format::f16) {
    encode_kernel<storage_format::f16><<<blocks, 256>>>(stride, codes, count);
  } else {
    encode_kernel<storage_format::bf16><<<blocks, 256>>>(stride, codes, count);
  }
  return cudaGetLastError();
}

cudaError_t decode_on_device(storage_format format, std::uint32_t* bits) {
  if (format == storage_format::f16) {
    decode_kernel<storage_format::f16><<<256, 256>>>(bits);
  } else {
    decode_kernel<storage_format::bf16><<<256, 256>>>(bits);
  }
  return cudaGetLastError();
}

}  // namespace stepgraph::test
