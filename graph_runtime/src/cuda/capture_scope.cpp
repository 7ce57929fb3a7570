#include "stepgraph/cuda/capture_scope.hpp"

#include <fmt/format.h>

#include "capture_state.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::cuda {

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  STEPGRAPH_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  if (status == cudaStreamCaptureStatusInvalidated) {
    throw capture_error("the stream's capture was invalidated by an earlier call");
  }
  return status == cudaStreamCaptureStatusActive;
}

capture_scope::capture_scope(cudaStream_t stream) : stream_(stream) {
  if (is_capturing(stream)) {
    throw capture_error("cannot begin a capture: the stream is being captured already");
  }
  const cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw capture_error(fmt::format("cannot begin a capture: {} ({})", cudaGetErrorString(status),
                                    cudaGetErrorName(status)));
  }
}

capture_scope::~capture_scope() {
  if (!open_) return;
  cudaGraph_t partial = nullptr;
  static_cast<void>(cudaStreamEndCapture(stream_, &partial));
  static_cast<void>(cudaGetLastError());
  if (partial != nullptr) static_cast<void>(cudaGraphDestroy(partial));
}

cudaGraphNode_t capture_scope::latest_node() const { return latest_captured_node(stream_); }

unique_graph capture_scope::finish() {
  open_ = false;
  cudaGraph_t handle = nullptr;
  const cudaError_t status = cudaStreamEndCapture(stream_, &handle);
  unique_graph captured(handle);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw capture_error(fmt::format("the capture was invalidated: {} ({})",
                                    cudaGetErrorString(status), cudaGetErrorName(status)));
  }
  std::size_t nodes = 0;
  STEPGRAPH_CUDA_CHECK(cudaGraphGetNodes(captured.get(), nullptr, &nodes));
  if (nodes == 0) throw capture_error("the capture holds no node, expected at least one");
  return captured;
}

}  // namespace stepgraph::cuda
