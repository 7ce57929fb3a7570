#pragma once

#include <string>

namespace stepgraph::cli {

/// The torch libraries of this program.
struct torch_backend {
  std::string version;
  std::string cuda_problem;  ///< why tensors cannot live on a GPU; empty: they can
};

/// Loads torch's CUDA library if that is possible. Never throws.
torch_backend find_torch_backend();

/// Name of torch's current GPU, for a program that can use it.
std::string current_gpu_name();

}  // namespace stepgraph::cli
