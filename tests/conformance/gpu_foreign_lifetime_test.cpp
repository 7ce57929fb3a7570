#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "conformance/foreign_kernels.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"

// Foreign work holds streams, events, memory and communicators of the caller's. Whichever goes
// first, the executor or what its graph captured: everything ends.
namespace stepgraph::test {
namespace {

/// What a communicator holds: a stream and events to fork and join with, and a buffer of a pool.
struct resource {
  explicit resource(cudaStream_t order) : stream(cuda::make_stream()) {
    forked = cuda::make_event();
    joined = cuda::make_event();
    void* allocated = nullptr;
    check(cudaMallocAsync(&allocated, sizeof(float), order));
    buffer = static_cast<float*>(allocated);
    check(cudaStreamSynchronize(order));
  }
  ~resource() { destroy(); }
  resource(const resource&) = delete;
  resource& operator=(const resource&) = delete;

  /// The gradient makes a detour over the stream and the buffer.
  void work(const float* gradient, float* target, cudaStream_t on) const {
    check(cudaEventRecord(forked.get(), on));
    check(cudaStreamWaitEvent(stream.get(), forked.get(), 0));
    check(cudaMemcpyAsync(buffer, gradient, sizeof(float), cudaMemcpyDeviceToDevice, stream.get()));
    check(cudaMemcpyAsync(target, buffer, sizeof(float), cudaMemcpyDeviceToDevice, stream.get()));
    check(cudaEventRecord(joined.get(), stream.get()));
    check(cudaStreamWaitEvent(on, joined.get(), 0));
  }

  /// As ncclCommDestroy: waits for its own stream, then frees.
  void destroy() {
    if (buffer == nullptr) return;
    (void)cudaStreamSynchronize(stream.get());
    (void)cudaFreeAsync(buffer, stream.get());
    (void)cudaStreamSynchronize(stream.get());
    buffer = nullptr;
    stream.reset();
    forked.reset();
    joined.reset();
  }

  cuda::unique_stream stream;
  cuda::unique_event forked;
  cuda::unique_event joined;
  float* buffer = nullptr;
};

class GpuForeignLifetime : public gpu_test {
 protected:
  static step_plan plan(const ones_on_device& tensor) {
    return plan_with(tensor, {{"exchange", foreign_order::before, "grad_stats"}});
  }
  static foreign_work exchange(const ones_on_device& tensor, const resource& held) {
    return {{"exchange", [&](cudaStream_t stream) {
               held.work(tensor.gradient.data(), tensor.gradient.data(), stream);
             }}};
  }
  static void expect_steps(const ones_on_device& tensor, int steps) {
    EXPECT_NEAR(tensor.first_parameter(), 1.0 - 0.1 * steps, 1e-5);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
};

TEST_F(GpuForeignLifetime, A22_ReleaseFirst) {
  const ones_on_device tensor;
  const cuda_stream stream;
  resource held(stream.get());
  graph_executor executor(plan(tensor), stream.get(), exchange(tensor, held));
  for (int step = 0; step < 3; ++step) executor.launch(stream.get());
  executor.release();
  held.destroy();
  expect_steps(tensor, 3);
}

TEST_F(GpuForeignLifetime, A22_ResourceFirst) {
  const ones_on_device tensor;
  const cuda_stream stream;
  resource held(stream.get());
  graph_executor executor(plan(tensor), stream.get(), exchange(tensor, held));
  for (int step = 0; step < 3; ++step) executor.launch(stream.get());
  stream.synchronize();
  held.destroy();
  executor.release();
  expect_steps(tensor, 3);
}

TEST_F(GpuForeignLifetime, A22_DestructorsInEitherOrder) {
  for (const bool executor_first : {true, false}) {
    const ones_on_device tensor;
    const cuda_stream stream;
    std::optional<resource> held(std::in_place, stream.get());
    std::optional<graph_executor> executor(std::in_place, plan(tensor), stream.get(),
                                           exchange(tensor, *held));
    executor->launch(stream.get());
    if (executor_first) {
      executor.reset();
      held.reset();
    } else {
      stream.synchronize();
      held.reset();
      executor.reset();
    }
    expect_steps(tensor, 1);
  }
}

TEST_F(GpuForeignLifetime, A22_ExceptionWhileLaunchesAreInFlight) {
  for (const bool executor_inside : {true, false}) {
    const ones_on_device tensor;
    const cuda_stream stream;
    try {
      resource held(stream.get());
      if (executor_inside) {
        graph_executor executor(plan(tensor), stream.get(), exchange(tensor, held));
        for (int step = 0; step < 5; ++step) executor.launch(stream.get());
        throw std::runtime_error("on the way out");
      }
      stream_executor executor(plan(tensor), stream.get(), exchange(tensor, held));
      for (int step = 0; step < 5; ++step) executor.launch(stream.get());
      throw std::runtime_error("on the way out");
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "on the way out");
    }
    expect_steps(tensor, 5);
  }
}

TEST_F(GpuForeignLifetime, A22_FailedCaptureLetsGoOfTheResource) {
  const ones_on_device tensor;
  const cuda_stream stream;
  resource held(stream.get());
  EXPECT_THROW(graph_executor(plan(tensor), stream.get(),
                              {{"exchange",
                                [&](cudaStream_t work) {
                                  held.work(tensor.gradient.data(), tensor.gradient.data(), work);
                                  throw std::runtime_error("in the middle");
                                }}}),
               std::runtime_error);
  held.destroy();
  expect_steps(tensor, 0);
}

TEST_F(GpuForeignLifetime, MemoryOfAPoolMayBeAllocatedAndFreedInsideTheGraph) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(plan(tensor), stream.get(),
                          {{"exchange", [&](cudaStream_t work) {
                              void* memory = nullptr;
                              check(cudaMallocAsync(&memory, sizeof(float), work));
                              check(cudaMemcpyAsync(memory, tensor.gradient.data(), sizeof(float),
                                                    cudaMemcpyDeviceToDevice, work));
                              check(cudaFreeAsync(memory, work));
                            }}});
  for (int step = 0; step < 3; ++step) executor.launch(stream.get());
  executor.release();
  expect_steps(tensor, 3);
}

/// Leaves its mark when the last copy of a callback goes.
struct mark {
  explicit mark(bool& gone) : gone_(&gone) {}
  mark(const mark&) = delete;
  mark& operator=(const mark&) = delete;
  ~mark() { *gone_ = true; }

 private:
  bool* gone_;
};

TEST_F(GpuForeignLifetime, CallbacksLiveAsLongAsTheExecutorAndNoLongerThanTheRelease) {
  const ones_on_device tensor;
  const cuda_stream stream;
  bool gone = false;
  auto held = std::make_shared<mark>(gone);
  graph_executor executor(plan(tensor), stream.get(), {{"exchange", [held](cudaStream_t) {}}});
  held.reset();
  executor.launch(stream.get());
  EXPECT_FALSE(gone);
  executor.release();
  EXPECT_TRUE(gone);
}

// How NCCL ties a communicator to the graphs that captured its work.
TEST_F(GpuForeignLifetime, ReleaseLetsGoOfObjectsThatTheGraphRetains) {
  const ones_on_device tensor;
  const cuda_stream stream;
  std::atomic<bool> destroyed = false;
  graph_executor executor(
      plan(tensor), stream.get(),
      {{"exchange", [&](cudaStream_t work) {
          cudaUserObject_t object = nullptr;
          check(cudaUserObjectCreate(
              &object, &destroyed,
              [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, 1,
              cudaUserObjectNoDestructorSync));
          cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
          cudaGraph_t graph = nullptr;
          check(
              cudaStreamGetCaptureInfo(work, &status, nullptr, &graph, nullptr, nullptr, nullptr));
          check(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
        }}});
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_FALSE(destroyed);
  executor.release();
  // A thread of the driver calls the destructor.
  for (int i = 0; i < 5000 && !destroyed; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(destroyed);
}

}  // namespace
}  // namespace stepgraph::test
