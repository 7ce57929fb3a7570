#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "stepgraph/schedule.hpp"

namespace stepgraph::test {

/// How many values of f32 lie between two numbers of at least 0, after rounding to f32.
inline std::int64_t f32_steps_between(double a, double b) {
  const auto place = [](double x) {
    return static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(static_cast<float>(x)));
  };
  return std::abs(place(a) - place(b));
}

/// Expects the schedule to be valid and within one last place of f32 of expected[n] at every clock
/// n.
inline void expect_schedule(const schedule& tested, const std::vector<double>& expected) {
  validate(tested);
  std::int64_t worst = 0;
  std::uint64_t worst_clock = 0;
  for (std::uint64_t n = 0; n < expected.size(); ++n) {
    const std::int64_t steps = f32_steps_between(value_at(tested, n), expected[n]);
    if (steps > worst) {
      worst = steps;
      worst_clock = n;
    }
  }
  EXPECT_LE(worst, 1) << "at clock " << worst_clock << ": " << value_at(tested, worst_clock)
                      << ", expected " << expected[worst_clock];
}

}  // namespace stepgraph::test
