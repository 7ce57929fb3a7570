#pragma once

#include <string>
#include <vector>

#include "bench_cases.hpp"

namespace stepgraph::cli {

/// A case as measured.
struct bench_row {
  bench_case measured;
  bench_times times;

  double gb_s() const { return static_cast<double>(times.bytes) / times.step_us * 1e-3; }
};

struct bench_result {
  std::string executor;
  std::string device;
  double copy_gb_s = 0.0;  ///< of a plain copy, read and written bytes together
  std::vector<bench_row> rows;
  std::vector<bench_case> left_out;  ///< for their memory
};

std::string text_of(const bench_result& result);
std::string json_of(const bench_result& result);

}  // namespace stepgraph::cli
