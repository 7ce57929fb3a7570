# Third-party libraries, each needed only by the part that names it here.

# kernels: the host loops.
find_package(OpenMP REQUIRED COMPONENTS CXX)

# graph_runtime, frontends: fmt::fmt-header-only (no shared library to match on another machine).
find_package(fmt REQUIRED)

if(STEPGRAPH_CLI OR STEPGRAPH_TESTS OR STEPGRAPH_PERF)
  find_package(nlohmann_json REQUIRED)
endif()
if(STEPGRAPH_CLI)
  find_package(CLI11 REQUIRED)
endif()
if(STEPGRAPH_TESTS)
  find_package(GTest REQUIRED)
endif()
if(STEPGRAPH_PERF)
  find_package(benchmark QUIET)
  if(NOT benchmark_FOUND)
    message(STATUS "stepgraph: Google Benchmark not found; perf/ is not built")
  endif()
endif()
