#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace stepgraph::cuda {

/// Move-only owner of a CUDA handle. The destructor releases it and ignores errors: by then the
/// first error has been reported, or the context is gone.
template <class Handle, auto Release>
class unique_handle {
 public:
  unique_handle() = default;
  explicit unique_handle(Handle handle) noexcept : handle_(handle) {}
  unique_handle(unique_handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  unique_handle& operator=(unique_handle&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~unique_handle() { reset(); }

  Handle get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != nullptr; }
  void reset() noexcept {
    if (handle_ != nullptr) static_cast<void>(Release(std::exchange(handle_, nullptr)));
  }

 private:
  Handle handle_ = nullptr;
};

using unique_stream = unique_handle<cudaStream_t, cudaStreamDestroy>;
using unique_event = unique_handle<cudaEvent_t, cudaEventDestroy>;
using unique_graph = unique_handle<cudaGraph_t, cudaGraphDestroy>;
using unique_graph_exec = unique_handle<cudaGraphExec_t, cudaGraphExecDestroy>;
using unique_device_memory = unique_handle<void*, cudaFree>;
using unique_pinned_memory = unique_handle<void*, cudaFreeHost>;

/// A stream that does not synchronise with the legacy default stream. Throws cuda_error.
unique_stream make_stream();
/// An event without timing. Throws cuda_error.
unique_event make_event();
/// `bytes` of the current device's memory. Throws cuda_error.
unique_device_memory allocate_device(std::size_t bytes);
/// `bytes` of page-locked host memory that every device can read. Throws cuda_error.
unique_pinned_memory allocate_pinned(std::size_t bytes);

/// Makes a device current for a scope and restores the previous one.
class device_guard {
 public:
  explicit device_guard(int device);
  ~device_guard();
  device_guard(const device_guard&) = delete;
  device_guard& operator=(const device_guard&) = delete;

 private:
  int previous_ = -1;  ///< -1: nothing to restore
};

}  // namespace stepgraph::cuda
