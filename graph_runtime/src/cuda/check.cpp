#include "stepgraph/cuda/check.hpp"

#include <fmt/format.h>

#include "stepgraph/error.hpp"

namespace stepgraph::cuda {

void check(cudaError_t status, const char* expression, std::source_location location) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw cuda_error(
      fmt::format("{} failed with {}: {} ({}:{})", expression, cudaGetErrorName(status),
                  cudaGetErrorString(status), location.file_name(), location.line()),
      static_cast<int>(status));
}

}  // namespace stepgraph::cuda
