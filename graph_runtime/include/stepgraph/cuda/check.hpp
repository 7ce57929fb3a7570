#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

namespace stepgraph::cuda {

/// Throws cuda_error with the failing expression, the error's name and text, and the source
/// location, unless `status` is cudaSuccess. Clears the thread's last error, so that a failure is
/// reported once.
void check(cudaError_t status, const char* expression,
           std::source_location location = std::source_location::current());

}  // namespace stepgraph::cuda

/// Evaluates a CUDA runtime call; throws stepgraph::cuda_error if it fails.
#define STEPGRAPH_CUDA_CHECK(expression) ::stepgraph::cuda::check((expression), #expression)
