#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "common/cuda_testing.hpp"

namespace stepgraph::test {

/// Holds a stream until it is opened, or for half a minute.
class stream_gate {
 public:
  explicit stream_gate(cudaStream_t stream) : stream_(stream) {
    check(cudaLaunchHostFunc(
        stream,
        [](void* gate) {
          auto& self = *static_cast<stream_gate*>(gate);
          for (int i = 0; i < 30'000 && !self.open_; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          self.passed_ = true;
        },
        this));
  }
  ~stream_gate() {
    open();
    (void)cudaStreamSynchronize(stream_);
  }
  stream_gate(const stream_gate&) = delete;
  stream_gate& operator=(const stream_gate&) = delete;

  void open() { open_ = true; }
  bool passed() const { return passed_; }

 private:
  cudaStream_t stream_;
  std::atomic<bool> open_ = false;
  std::atomic<bool> passed_ = false;
};

}  // namespace stepgraph::test
