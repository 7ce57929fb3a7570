#include "device_context.hpp"

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "bench_main.hpp"
#include "stepgraph/cuda/check.hpp"

namespace stepgraph::perf {
namespace {

/// "580.95.05"; the runtime only knows which CUDA the driver supports.
std::string kernel_driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    const bool is_version = word.find('.') != std::string::npos &&
                            word.find_first_not_of("0123456789.") == std::string::npos;
    if (is_version) return word;
  }
  return "unknown";
}

}  // namespace

bool add_device_context() {
  int device = 0;
  cudaDeviceProp properties = {};
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaGetDeviceProperties(&properties, device);
  int driver = 0;
  int runtime = 0;
  if (status == cudaSuccess) status = cudaDriverGetVersion(&driver);
  if (status == cudaSuccess) status = cudaRuntimeGetVersion(&runtime);
  if (status != cudaSuccess) {
    fmt::print(stderr, "no CUDA device to measure: {}\n", cudaGetErrorString(status));
    return false;
  }
  const auto version = [](int number) {
    return fmt::format("{}.{}", number / 1000, number % 1000 / 10);
  };
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::AddCustomContext("driver", kernel_driver_version());
  benchmark::AddCustomContext("cuda_driver", version(driver));
  benchmark::AddCustomContext("cuda_runtime", version(runtime));
  return add_host_context();
}

device_location current_device() {
  int device = 0;
  STEPGRAPH_CUDA_CHECK(cudaGetDevice(&device));
  return {device_kind::cuda, device};
}

}  // namespace stepgraph::perf
