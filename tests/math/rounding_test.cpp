#include "stepgraph/math/rounding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "stepgraph/math/fp8.hpp"

namespace stepgraph {
namespace {

/// A binary format by its parameters. Decoding and encoding below follow the definition in double,
/// which holds every f32 and every code exactly.
struct binary_format {
  const char* name;
  int mantissa_bits;
  int exponent_bits;
  int largest_code;   ///< finite
  int infinity_code;  ///< of a stored infinity; past all codes where there is none
  int overflow_code;  ///< what a value past the largest becomes
  int nan_code;       ///< what a NaN becomes

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int sign_bit() const { return 1 << (mantissa_bits + exponent_bits); }
  int code_count() const { return 2 * sign_bit(); }
};
constexpr binary_format binary16 = {"f16", 10, 5, 0x7bff, 0x7c00, 0x7c00, 0x7fff};
constexpr binary_format bfloat16 = {"bf16", 7, 8, 0x7f7f, 0x7f80, 0x7f80, 0x7fff};
// OCP 8-bit floating point specification, table 1; out of range saturates.
constexpr binary_format e4m3 = {"e4m3", 3, 4, 0x7e, 0x80, 0x7e, 0x7f};
constexpr binary_format e5m2 = {"e5m2", 2, 5, 0x7b, 0x7c, 0x7b, 0x7f};

double decode_by_definition(const binary_format& format, int code) {
  const int magnitude = code & (format.sign_bit() - 1);
  const double sign = (code & format.sign_bit()) != 0 ? -1.0 : 1.0;
  if (magnitude == format.infinity_code) return sign * std::numeric_limits<double>::infinity();
  if (magnitude > format.largest_code) return std::numeric_limits<double>::quiet_NaN();
  const int mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
  const int exponent = magnitude >> format.mantissa_bits;
  if (exponent == 0) {
    return sign * std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits);
  }
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits),
                           exponent - format.bias() - format.mantissa_bits);
}

int encode_by_definition(const binary_format& format, float value) {
  if (std::isnan(value)) return format.nan_code;
  const int sign = std::signbit(value) ? format.sign_bit() : 0;
  const double magnitude = std::abs(static_cast<double>(value));
  int code = format.overflow_code;
  if (magnitude == 0.0) {
    code = 0;
  } else if (std::isfinite(magnitude)) {
    // Codes of positive numbers count quanta: rounding to a whole number of quanta and adding it
    // to the code of the binade's start carries into the exponent by itself.
    const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias());
    const double quanta = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
    code = ((exponent + format.bias() - 1) << format.mantissa_bits) + static_cast<int>(quanta);
    if (code > format.largest_code) code = format.overflow_code;
  }
  return sign | code;
}

template <storage_format Format>
struct format_under_test {
  using traits = math::format_traits<Format>;
  using storage = typename traits::storage;
  static constexpr binary_format definition = Format == storage_format::f16    ? binary16
                                              : Format == storage_format::bf16 ? bfloat16
                                              : Format == storage_format::e4m3 ? e4m3
                                                                               : e5m2;
};

template <class Format>
class NarrowFormat : public ::testing::Test {};

struct format_names {
  template <class Format>
  static std::string GetName(int) {
    return Format::definition.name;
  }
};
using narrow_formats = ::testing::Types<
    format_under_test<storage_format::f16>, format_under_test<storage_format::bf16>,
    format_under_test<storage_format::e4m3>, format_under_test<storage_format::e5m2>>;
TYPED_TEST_SUITE(NarrowFormat, narrow_formats, format_names);

TYPED_TEST(NarrowFormat, EveryCodeDecodesToItsDefinition) {
  for (int code = 0; code < TypeParam::definition.code_count(); ++code) {
    const float decoded = TypeParam::traits::decode(static_cast<typename TypeParam::storage>(code));
    const double expected = decode_by_definition(TypeParam::definition, code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(decoded)) << std::hex << code;
    } else {
      ASSERT_EQ(static_cast<double>(decoded), expected) << std::hex << code;
      ASSERT_EQ(std::signbit(decoded), (code & TypeParam::definition.sign_bit()) != 0)
          << std::hex << code;
    }
  }
}

TYPED_TEST(NarrowFormat, EveryCodeSurvivesDecodingAndEncoding) {
  for (int code = 0; code < TypeParam::definition.code_count(); ++code) {
    const float decoded = TypeParam::traits::decode(static_cast<typename TypeParam::storage>(code));
    const int sign = code & TypeParam::definition.sign_bit();
    const int expected = std::isnan(decoded)   ? TypeParam::definition.nan_code
                         : std::isinf(decoded) ? sign | TypeParam::definition.overflow_code
                                               : code;
    ASSERT_EQ(TypeParam::traits::encode(decoded), expected) << std::hex << code;
  }
}

TYPED_TEST(NarrowFormat, EncodesASweepOfAllFloatsByDefinition) {
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 251) {
    const float value = math::bits_to_float(static_cast<std::uint32_t>(bits));
    ASSERT_EQ(TypeParam::traits::encode(value), encode_by_definition(TypeParam::definition, value))
        << std::hexfloat << value << " 0x" << std::hex << bits;
  }
}

// A rounding rule goes wrong at the numbers half way between two codes and next to them.
TYPED_TEST(NarrowFormat, EncodesEveryTieAndItsNeighboursByDefinition) {
  double gap_below = 0.0;
  for (int code = 0; code <= TypeParam::definition.largest_code; ++code) {
    const double here = decode_by_definition(TypeParam::definition, code);
    const double next = decode_by_definition(TypeParam::definition, code + 1);
    const double gap = std::isfinite(next) ? next - here : gap_below;
    gap_below = gap;
    const auto tie = static_cast<float>(here + gap / 2.0);
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, infinity)}) {
      for (const float either : {value, -value}) {
        ASSERT_EQ(TypeParam::traits::encode(either),
                  encode_by_definition(TypeParam::definition, either))
            << std::hexfloat << either;
      }
    }
  }
}

TEST(F16Encode, OverflowStartsHalfWayToTheNextPowerOfTwo) {
  using f16 = math::format_traits<storage_format::f16>;
  EXPECT_EQ(f16::encode(65504.0f), 0x7bff);
  EXPECT_EQ(f16::encode(65519.99f), 0x7bff);
  EXPECT_EQ(f16::encode(65520.0f), 0x7c00);
  EXPECT_EQ(f16::encode(-65520.0f), 0xfc00);
  EXPECT_EQ(f16::encode(std::numeric_limits<float>::max()), 0x7c00);
}

TEST(F16Encode, SubnormalsRoundToEven) {
  using f16 = math::format_traits<storage_format::f16>;
  EXPECT_EQ(f16::encode(0x1p-24f), 0x0001);
  EXPECT_EQ(f16::encode(0x1p-25f), 0x0000);
  EXPECT_EQ(f16::encode(-0x1p-25f), 0x8000);
  EXPECT_EQ(f16::encode(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(f16::encode(0x1.8p-24f), 0x0002);
  EXPECT_EQ(f16::encode(0x1.ff8p-15f), 0x03ff);
  EXPECT_EQ(f16::encode(0x1.ffcp-15f), 0x0400);  // half way to the smallest normal number
}

TEST(Bf16Encode, LargestFloatRoundsToInfinity) {
  using bf16 = math::format_traits<storage_format::bf16>;
  EXPECT_EQ(bf16::encode(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(bf16::encode(0x1.fep127f), 0x7f7f);
  EXPECT_EQ(bf16::encode(0x1p-133f), 0x0001);
  EXPECT_EQ(bf16::encode(0x1p-134f), 0x0000);
}

TEST(Fp8Encode, SaturatesWhereOthersOverflow) {
  using e4m3_traits = math::format_traits<storage_format::e4m3>;
  using e5m2_traits = math::format_traits<storage_format::e5m2>;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float huge : {449.0f, 464.0f, 1e10f, std::numeric_limits<float>::max(), infinity}) {
    EXPECT_EQ(e4m3_traits::decode(e4m3_traits::encode(huge)), 448.0f) << huge;
    EXPECT_EQ(e4m3_traits::decode(e4m3_traits::encode(-huge)), -448.0f) << huge;
  }
  for (const float huge : {57345.0f, 65536.0f, 1e10f, infinity}) {
    EXPECT_EQ(e5m2_traits::decode(e5m2_traits::encode(huge)), 57344.0f) << huge;
    EXPECT_EQ(e5m2_traits::decode(e5m2_traits::encode(-huge)), -57344.0f) << huge;
  }
}

TYPED_TEST(NarrowFormat, EveryNaNBecomesTheCanonicalOne) {
  for (const std::uint32_t bits :
       {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    EXPECT_EQ(TypeParam::traits::encode(math::bits_to_float(bits)), TypeParam::definition.nan_code)
        << std::hex << bits;
  }
}

}  // namespace
}  // namespace stepgraph
