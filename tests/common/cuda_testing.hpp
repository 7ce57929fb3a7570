#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace stepgraph::test {

/// Throws with the caller's line if a CUDA call of a test failed.
inline void check(cudaError_t status,
                  const std::source_location& where = std::source_location::current()) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(where.file_name()) + ":" + std::to_string(where.line()) +
                           ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

/// CUDA devices here; `reason` says why there is none.
inline int device_count(std::string* reason = nullptr) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    count = 0;
  }
  if (reason != nullptr) {
    *reason = status != cudaSuccess ? cudaGetErrorString(status) : "no CUDA device";
  }
  return count;
}

/// Base of suites that need a GPU.
class gpu_test : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (device_count(&reason) == 0) GTEST_SKIP() << "needs a GPU: " << reason;
  }
};

class cuda_stream {
 public:
  cuda_stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~cuda_stream() { (void)cudaStreamDestroy(stream_); }
  cuda_stream(const cuda_stream&) = delete;
  cuda_stream& operator=(const cuda_stream&) = delete;

  cudaStream_t get() const { return stream_; }
  void synchronize() const { check(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Device memory of exactly this many elements, so that memcheck sees every access beside it.
template <class T>
class device_buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit device_buffer(std::size_t count) : count_(count) {
    if (count != 0) check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)));
  }
  explicit device_buffer(std::span<const T> values) : device_buffer(values.size()) {
    write(values);
  }
  explicit device_buffer(const std::vector<T>& values)
      : device_buffer(std::span<const T>(values)) {}
  device_buffer(device_buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  device_buffer& operator=(device_buffer&&) = delete;
  ~device_buffer() { (void)cudaFree(data_); }

  T* data() const { return data_; }
  std::size_t size() const { return count_; }

  /// Both wait for the copy.
  void write(std::span<const T> values) const {
    check(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
    // The copy returns when the source has been read; streams of our own do not wait for the rest.
    check(cudaStreamSynchronize(nullptr));
  }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    check(cudaDeviceSynchronize());
    check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace stepgraph::test
