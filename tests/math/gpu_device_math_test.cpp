#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/cuda_testing.hpp"
#include "common/storage.hpp"
#include "math/device_math.hpp"

// The device's instructions against the host's arithmetic, bit for bit.
namespace stepgraph {
namespace {

using test::check;
using test::conversion;
using test::device_buffer;
using test::element_function;

struct converted_format {
  storage_format format;
  conversion by;
};

class GpuConversions : public test::gpu_test,
                       public ::testing::WithParamInterface<converted_format> {};

std::vector<converted_format> converted_formats() {
  std::vector<converted_format> formats;
  for (const storage_format format :
       {storage_format::f16, storage_format::bf16, storage_format::e4m3, storage_format::e5m2}) {
    formats.push_back({format, conversion::single});
    formats.push_back({format, conversion::packed});
  }
  return formats;
}

INSTANTIATE_TEST_SUITE_P(GpuFormats, GpuConversions, ::testing::ValuesIn(converted_formats()),
                         [](const auto& tested) {
                           return std::string(name_of(tested.param.format)) +
                                  (tested.param.by == conversion::single ? "_single" : "_packed");
                         });

TEST_P(GpuConversions, EncodeASweepOfAllFloatsAsTheHostDoes) {
  constexpr std::uint32_t stride = 509;
  constexpr std::uint32_t count = 0xffffffffu / stride & ~3u;
  const device_buffer<std::uint16_t> codes(count);
  check(test::encode_on_device(GetParam().format, GetParam().by, stride, codes.data(), count));
  const std::vector<std::uint16_t> found = codes.read();
  test::with_traits(GetParam().format, [&](auto traits) {
    for (std::uint32_t i = 0; i < count; ++i) {
      const float value = math::bits_to_float(i * stride);
      if constexpr (sizeof(typename decltype(traits)::storage) < sizeof(float)) {
        ASSERT_EQ(found[i], decltype(traits)::encode(value)) << std::hexfloat << value;
      }
    }
  });
}

TEST_P(GpuConversions, DecodeEveryCodeAsTheHostDoes) {
  const std::uint32_t count = element_size(GetParam().format) == 1 ? 256 : 65536;
  const device_buffer<std::uint32_t> bits(count);
  check(test::decode_on_device(GetParam().format, GetParam().by, bits.data(), count));
  const std::vector<std::uint32_t> found = bits.read();
  test::with_traits(GetParam().format, [&](auto traits) {
    using storage = typename decltype(traits)::storage;
    for (std::uint32_t code = 0; code < count; ++code) {
      const float expected = decltype(traits)::decode(static_cast<storage>(code));
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(math::bits_to_float(found[code]))) << std::hex << code;
      } else {
        ASSERT_EQ(found[code], math::float_bits(expected)) << std::hex << code;
      }
    }
  });
}

/// Expects a function to give the host's bits for `count` consecutive f32 from `first`.
template <class Expected>
void expect_ieee(element_function function, float first, std::uint32_t count, Expected&& expected) {
  const device_buffer<float> results(count);
  const std::uint32_t bits = math::float_bits(first);
  check(test::apply_on_device(function, bits, results.data(), count));
  const std::vector<float> found = results.read();
  for (std::uint32_t i = 0; i < count; ++i) {
    const float x = math::bits_to_float(bits + i);
    ASSERT_EQ(math::float_bits(found[i]), math::float_bits(expected(x))) << std::hexfloat << x;
  }
}

class GpuLargeRestricted : public test::gpu_test {};

constexpr std::uint32_t mantissas = 1u << 23;

TEST_F(GpuLargeRestricted, SquareRootIsIeeeForEveryMantissaOfBothParities) {
  const auto ieee = [](float x) { return std::sqrt(x); };
  for (const float first : {0x1p-101f, 0x1p-40f, 0x1p-2f, 0x1p0f, 0x1p1f, 0x1p60f, 0x1p126f}) {
    expect_ieee(element_function::restricted_square_root, first, 2 * mantissas, ieee);
  }
}

TEST_F(GpuLargeRestricted, ReciprocalIsIeeeForEveryMantissa) {
  const auto ieee = [](float x) { return 1.0f / x; };
  for (const float first : {0x1p-100f, 0x1p-50f, 0x1p-1f, 0x1p0f, 0x1p1f, 0x1p50f, 0x1p99f}) {
    expect_ieee(element_function::restricted_reciprocal, first, mantissas + 1, ieee);
  }
}

class GpuRestricted : public test::gpu_test {};

TEST_F(GpuRestricted, EndsOfTheDomainsAndEveryPowerOfTwoAreIeee) {
  const auto root = [](float x) { return std::sqrt(x); };
  const auto inverse = [](float x) { return 1.0f / x; };
  for (int exponent = -101; exponent < 128; ++exponent) {
    expect_ieee(element_function::restricted_square_root, std::ldexp(1.0f, exponent), 64, root);
  }
  const float largest = math::bits_to_float(0x7f7fffffu - 63u);
  expect_ieee(element_function::restricted_square_root, largest, 64, root);
  for (int exponent = -100; exponent < 100; ++exponent) {
    expect_ieee(element_function::restricted_reciprocal, std::ldexp(1.0f, exponent), 64, inverse);
  }
  expect_ieee(element_function::restricted_reciprocal, 0x1p100f, 1, inverse);
}

class GpuLargeRemainder : public test::gpu_test {};

TEST_F(GpuLargeRemainder, EveryBitPatternSurvivesSplittingAndJoining) {
  const device_buffer<unsigned long long> changed(std::vector<unsigned long long>{0});
  check(test::count_changed_by_remainder(changed.data()));
  EXPECT_EQ(changed.read()[0], 0u);
}

}  // namespace
}  // namespace stepgraph
