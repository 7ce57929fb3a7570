#pragma once

#include <nvtx3/nvtx3.hpp>

namespace stepgraph::cuda {

/// The domain of this library's ranges in a profiler.
struct trace_domain {
  static constexpr const char* name = "stepgraph";
};

/// A range of the calling thread, `trace_range range("stepgraph step");`: nanoseconds unless a
/// profiler listens.
using trace_range = nvtx3::scoped_range_in<trace_domain>;

}  // namespace stepgraph::cuda
