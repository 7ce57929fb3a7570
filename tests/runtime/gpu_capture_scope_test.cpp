#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "common/cuda_testing.hpp"
#include "common/expect_error.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::test {
namespace {

class GpuCaptureScope : public gpu_test {
 protected:
  void SetUp() override {
    gpu_test::SetUp();
    if (IsSkipped()) return;
    stream_.emplace();
    memory_.emplace(std::vector<std::uint32_t>{1});
  }
  cudaStream_t stream() const { return stream_->get(); }
  /// One captured or executed node.
  void enqueue(int byte) { check(cudaMemsetAsync(memory_->data(), byte, 4, stream())); }
  void expect_stream_works() {
    EXPECT_FALSE(cuda::is_capturing(stream()));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    enqueue(0x7f);
    stream_->synchronize();
    EXPECT_EQ(memory_->read()[0], 0x7f7f7f7fu);
  }

 private:
  std::optional<cuda_stream> stream_;
  std::optional<device_buffer<std::uint32_t>> memory_;
};

TEST_F(GpuCaptureScope, FinishReturnsWhatWasCapturedAndRunsNothing) {
  enqueue(0x11);
  cuda::capture_scope capture(stream());
  EXPECT_TRUE(cuda::is_capturing(stream()));
  enqueue(0x22);
  const cudaGraphNode_t first = capture.latest_node();
  enqueue(0x33);
  EXPECT_NE(capture.latest_node(), first);
  const cuda::unique_graph graph = capture.finish();
  std::size_t nodes = 0;
  check(cudaGraphGetNodes(graph.get(), nullptr, &nodes));
  EXPECT_EQ(nodes, 2u);
  expect_stream_works();
}

TEST_F(GpuCaptureScope, ThrowInTheMiddleEndsTheCaptureAndKeepsTheFirstError) {
  try {
    cuda::capture_scope capture(stream());
    enqueue(0x22);
    throw std::runtime_error("the first error");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the first error");
  }
  expect_stream_works();
}

TEST_F(GpuCaptureScope, ForbiddenCallInvalidatesTheCaptureAndTheScopeRepairsTheStream) {
  try {
    cuda::capture_scope capture(stream());
    enqueue(0x22);
    // A stream cannot be waited for while it is captured.
    STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream()));
    FAIL() << "the call was expected to fail";
  } catch (const cuda_error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("cudaStreamSynchronize"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("gpu_capture_scope_test.cpp"));
    EXPECT_NE(error.status(), 0);
  }
  expect_stream_works();
}

TEST_F(GpuCaptureScope, FinishOfAnInvalidatedCaptureThrowsAndTheStreamWorks) {
  {
    cuda::capture_scope capture(stream());
    enqueue(0x22);
    EXPECT_NE(cudaStreamSynchronize(stream()), cudaSuccess);
    (void)cudaGetLastError();
    expect_error<capture_error>([&] { capture.finish(); }, {"invalidated"});
  }
  expect_stream_works();
}

TEST_F(GpuCaptureScope, A32_EmptyCaptureIsAnError) {
  {
    cuda::capture_scope capture(stream());
    expect_error<capture_error>([&] { capture.finish(); }, {"no node"});
  }
  expect_stream_works();
}

TEST_F(GpuCaptureScope, LatestNodeOfAnEmptyCaptureIsAnError) {
  cuda::capture_scope capture(stream());
  expect_error<capture_error>([&] { capture.latest_node(); }, {"0"});
}

TEST_F(GpuCaptureScope, SecondCaptureOfAStreamIsRefusedAndTheFirstGoesOn) {
  cuda::capture_scope capture(stream());
  enqueue(0x22);
  expect_error<capture_error>([&] { cuda::capture_scope second(stream()); }, {"captured already"});
  enqueue(0x33);
  const cuda::unique_graph graph = capture.finish();
  std::size_t nodes = 0;
  check(cudaGraphGetNodes(graph.get(), nullptr, &nodes));
  EXPECT_EQ(nodes, 2u);
  expect_stream_works();
}

TEST_F(GpuCaptureScope, LegacyDefaultStreamIsRefused) {
  expect_error<capture_error>([] { cuda::capture_scope capture(nullptr); }, {"capture"});
  expect_stream_works();
}

TEST_F(GpuCaptureScope, OtherThreadsMayUseCudaMeanwhile) {
  cuda::capture_scope capture(stream());
  enqueue(0x22);
  std::string failure;
  std::thread([&] {
    try {
      // Calls that a capture in global mode would make fail.
      const device_buffer<float> memory(std::vector<float>(16, 1.0f));
      void* pinned = nullptr;
      check(cudaHostAlloc(&pinned, 64, cudaHostAllocDefault));
      check(cudaFreeHost(pinned));
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }).join();
  EXPECT_EQ(failure, "");
  EXPECT_TRUE(capture.finish());
  expect_stream_works();
}

TEST_F(GpuCaptureScope, CheckClearsTheErrorItReports) {
  EXPECT_THROW(STEPGRAPH_CUDA_CHECK(cudaSetDevice(-1)), cuda_error);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

}  // namespace
}  // namespace stepgraph::test
