#include "stepgraph/libtorch/cuda_backend.hpp"

#if defined(STEPGRAPH_LIBTORCH_CUDA)
#include <ATen/Context.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>
#endif

namespace stepgraph::libtorch {
namespace {

#if defined(STEPGRAPH_LIBTORCH_CUDA)

/// Where libtorch_cuda.so lies: beside libtorch_cpu.so, which this program has loaded already.
std::string path_of_backend() {
  Dl_info info{};
  const std::string file = "libtorch_cuda.so";
  if (dladdr(reinterpret_cast<const void*>(&at::globalContext), &info) == 0 ||
      info.dli_fname == nullptr) {
    return file;
  }
  const std::string path = info.dli_fname;
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? file : path.substr(0, slash + 1) + file;
}

/// Empty when CUDA tensors can be used.
std::string load() {
  // Without a driver the device count fails with a message about its version.
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    (void)cudaGetLastError();
    return "no NVIDIA driver";
  }
  int devices = 0;
  const cudaError_t result = cudaGetDeviceCount(&devices);
  if (result != cudaSuccess) {
    (void)cudaGetLastError();  // not an error of the next CUDA call
    return fmt::format("no usable CUDA device: {}", cudaGetErrorString(result));
  }
  if (devices == 0) return "no CUDA device";
  // For the life of the process: torch keeps pointers into it.
  if (dlopen(path_of_backend().c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    const char* reason = dlerror();
    return fmt::format("torch's CUDA library could not be loaded: {}",
                       reason == nullptr ? "unknown reason" : reason);
  }
  if (!at::globalContext().hasCUDA()) {
    return "torch does not see a CUDA device, or was asked about CUDA before its CUDA library was "
           "loaded";
  }
  return {};
}

#else

std::string load() { return "built without CUDA"; }

#endif

}  // namespace

bool load_torch_cuda_backend(std::string* why_not) {
  static const std::string reason = load();
  if (why_not != nullptr) *why_not = reason;
  return reason.empty();
}

}  // namespace stepgraph::libtorch
