#pragma once

#include <cstdint>

#include "stepgraph/math/portability.hpp"

namespace stepgraph::math {

/// base^exponent by repeated squaring: the same multiplications, hence the same bits, on the host
/// and on the device, which a library `pow` does not promise.
STEPGRAPH_HOST_DEVICE double integer_power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result *= base;
    base *= base;
  }
  return result;
}

/// 1 - beta^step, by which a moment that started at zero is divided.
STEPGRAPH_HOST_DEVICE double bias_correction(double beta, std::uint64_t step) {
  return 1.0 - integer_power(beta, step);
}

}  // namespace stepgraph::math
