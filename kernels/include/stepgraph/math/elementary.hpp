#pragma once

#include <cstdint>

#include "stepgraph/math/portability.hpp"

/// Elementary functions in double. The libraries of host and device need not agree on the last bit
/// of `cos`, `log2` or `pow`; the additions, multiplications, divisions and fused multiply-adds
/// below, in this order, do.
namespace stepgraph::math {

/// cos(pi * x) for x in [0, 1], within 2 ulp. Exact at 0, 1/2 and 1.
STEPGRAPH_HOST_DEVICE double cosine_of_pi_times(double x) {
  // pi in two parts: the second keeps the angle exact to its last place.
  constexpr double pi = 3.14159265358979323846;
  constexpr double pi_low = 1.2246467991473532e-16;
  // Reflect to [0, 1/2], then use sin(pi * (1/2 - x)) near the zero of the cosine.
  const bool reflected = x > 0.5;
  const double y = reflected ? 1.0 - x : x;
  double value = 0.0;
  if (y <= 0.25) {
    const double angle = fused_multiply_add(pi, y, pi_low * y);
    const double square = angle * angle;
    double term = 1.0 / 20922789888000.0;  // 1 / 16!
    term = fused_multiply_add(-square, term, 1.0 / 87178291200.0);
    term = fused_multiply_add(-square, term, 1.0 / 479001600.0);
    term = fused_multiply_add(-square, term, 1.0 / 3628800.0);
    term = fused_multiply_add(-square, term, 1.0 / 40320.0);
    term = fused_multiply_add(-square, term, 1.0 / 720.0);
    term = fused_multiply_add(-square, term, 1.0 / 24.0);
    term = fused_multiply_add(-square, term, 0.5);
    value = fused_multiply_add(-square, term, 1.0);
  } else {
    const double distance = 0.5 - y;
    const double angle = fused_multiply_add(pi, distance, pi_low * distance);
    const double square = angle * angle;
    double term = 1.0 / 355687428096000.0;  // 1 / 17!
    term = fused_multiply_add(-square, term, 1.0 / 1307674368000.0);
    term = fused_multiply_add(-square, term, 1.0 / 6227020800.0);
    term = fused_multiply_add(-square, term, 1.0 / 39916800.0);
    term = fused_multiply_add(-square, term, 1.0 / 362880.0);
    term = fused_multiply_add(-square, term, 1.0 / 5040.0);
    term = fused_multiply_add(-square, term, 1.0 / 120.0);
    term = fused_multiply_add(-square, term, 1.0 / 6.0);
    term = fused_multiply_add(-square, term, 1.0);
    value = angle * term;
  }
  return reflected ? -value : value;
}

/// The unevaluated sum of two doubles, the second at most half a last place of the first.
struct two_part_sum {
  double high;
  double low;
};

/// a + b without loss, for |a| >= |b| or a = 0.
STEPGRAPH_HOST_DEVICE two_part_sum exact_sum(double a, double b) {
  const double high = a + b;
  return {high, (a - high) + b};
}

/// log2(x) for finite x > 0, with about 59 correct bits: `power` multiplies its error by an
/// exponent of up to 2^10.
STEPGRAPH_HOST_DEVICE two_part_sum log2_in_two_parts(double x) {
  constexpr std::uint64_t fraction_bits = 0xfffffffffffffu;
  constexpr std::uint64_t bits_of_one = 0x3ff0000000000000u;
  const bool subnormal = x < 0x1p-1022;
  const std::uint64_t bits = __builtin_bit_cast(std::uint64_t, subnormal ? x * 0x1p54 : x);
  double exponent = static_cast<double>(bits >> 52) - (subnormal ? 1077.0 : 1023.0);
  double mantissa = __builtin_bit_cast(double, (bits & fraction_bits) | bits_of_one);
  if (mantissa > 1.4142135623730951) {  // to [sqrt(1/2), sqrt(2)]: the shortest series
    mantissa *= 0.5;
    exponent += 1.0;
  }

  // log(m) = 2 * (s + s^3 / 3 + s^5 / 5 + ...) with s = (m - 1) / (m + 1), |s| < 0.172.
  const double numerator = mantissa - 1.0;  // exact
  const double denominator = mantissa + 1.0;
  const double denominator_low = mantissa - (denominator - 1.0);
  const double s = numerator / denominator;
  const double residual =
      fused_multiply_add(-s, denominator_low, fused_multiply_add(-s, denominator, numerator));
  const double s_low = residual / denominator;
  const double square = s * s;
  double tail = 1.0 / 23.0;
  tail = fused_multiply_add(square, tail, 1.0 / 21.0);
  tail = fused_multiply_add(square, tail, 1.0 / 19.0);
  tail = fused_multiply_add(square, tail, 1.0 / 17.0);
  tail = fused_multiply_add(square, tail, 1.0 / 15.0);
  tail = fused_multiply_add(square, tail, 1.0 / 13.0);
  tail = fused_multiply_add(square, tail, 1.0 / 11.0);
  tail = fused_multiply_add(square, tail, 1.0 / 9.0);
  tail = fused_multiply_add(square, tail, 1.0 / 7.0);
  tail = fused_multiply_add(square, tail, 1.0 / 5.0);
  tail = fused_multiply_add(square, tail, 1.0 / 3.0);
  tail *= square;

  constexpr double two_over_log_2 = 2.8853900817779268;
  constexpr double two_over_log_2_low = 4.0710547481862066e-17;
  const double high = s * two_over_log_2;
  double low = fused_multiply_add(s, two_over_log_2, -high);
  low = fused_multiply_add(s, two_over_log_2_low, low);
  low = fused_multiply_add(fused_multiply_add(s, tail, s_low), two_over_log_2, low);

  const two_part_sum leading = exact_sum(exponent, high);
  return exact_sum(leading.high, leading.low + low);
}

/// 2^exponent for -1022 <= exponent <= 1023.
STEPGRAPH_HOST_DEVICE double power_of_two(std::int32_t exponent) {
  return __builtin_bit_cast(double, static_cast<std::uint64_t>(exponent + 1023) << 52);
}

/// 2^(high + low), correct to about 1 ulp; infinity or 0 out of range.
STEPGRAPH_HOST_DEVICE double exp2_of_sum(two_part_sum x) {
  if (!(x.high < 1025.0)) return __builtin_inf();
  if (x.high < -1080.0) return 0.0;
  const auto whole = static_cast<std::int32_t>(x.high + (x.high < 0.0 ? -0.5 : 0.5));
  constexpr double log_2 = 0.6931471805599453;
  const double angle = ((x.high - static_cast<double>(whole)) + x.low) * log_2;  // |angle| < 0.35
  double term = 1.0 / 6227020800.0;                                              // 1 / 13!
  term = fused_multiply_add(angle, term, 1.0 / 479001600.0);
  term = fused_multiply_add(angle, term, 1.0 / 39916800.0);
  term = fused_multiply_add(angle, term, 1.0 / 3628800.0);
  term = fused_multiply_add(angle, term, 1.0 / 362880.0);
  term = fused_multiply_add(angle, term, 1.0 / 40320.0);
  term = fused_multiply_add(angle, term, 1.0 / 5040.0);
  term = fused_multiply_add(angle, term, 1.0 / 720.0);
  term = fused_multiply_add(angle, term, 1.0 / 120.0);
  term = fused_multiply_add(angle, term, 1.0 / 24.0);
  term = fused_multiply_add(angle, term, 1.0 / 6.0);
  term = fused_multiply_add(angle, term, 0.5);
  term = fused_multiply_add(angle, term, 1.0);
  const double fraction = fused_multiply_add(angle, term, 1.0);
  // In two factors: the ends of the range need exponents that one double does not have.
  const std::int32_t half = whole / 2;
  return fraction * power_of_two(half) * power_of_two(whole - half);
}

/// log2(x) for finite x > 0, within 1 ulp. Exact at powers of two.
STEPGRAPH_HOST_DEVICE double log2(double x) { return log2_in_two_parts(x).high; }

/// 2^x for finite x, within 2 ulp. Exact at integers.
STEPGRAPH_HOST_DEVICE double exp2(double x) { return exp2_of_sum({x, 0.0}); }

/// x^y for finite x >= 0 and finite y, with a relative error below 2e-15 where the result is a
/// normal double. 0^0 is 1; 0 to any other power is 0.
STEPGRAPH_HOST_DEVICE double power(double x, double y) {
  if (x == 0.0) return y == 0.0 ? 1.0 : 0.0;
  const two_part_sum logarithm = log2_in_two_parts(x);
  const double product = y * logarithm.high;
  const double rounding = fused_multiply_add(y, logarithm.high, -product);
  return exp2_of_sum({product, fused_multiply_add(y, logarithm.low, rounding)});
}

}  // namespace stepgraph::math
