#pragma once

#include <string>

namespace stepgraph::libtorch {

/// Loads torch's CUDA operators (libtorch_cuda.so) into a program that does not link them, so that
/// the same program starts on machines without CUDA. Call it before anything else asks torch about
/// CUDA: torch remembers the first answer. Returns true if CUDA tensors can be used. Otherwise
/// returns false, stores the reason in `why_not` (if not null) and the program goes on with CPU
/// tensors. Nothing is loaded unless stepgraph was built with CUDA and a device is there. Calling
/// it again returns the first result. Thread-safe.
bool load_torch_cuda_backend(std::string* why_not = nullptr);

}  // namespace stepgraph::libtorch
