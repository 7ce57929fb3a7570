#pragma once

#include <cuda_runtime_api.h>

#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::cuda {

/// Captures what is enqueued onto a stream until `finish` or the end of the scope.
///
/// Thread-local capture mode: other threads may use CUDA meanwhile. If the scope is left without
/// `finish`, by an exception for example, the capture ends, the partial graph is dropped and the
/// stream is usable again; the exception in flight stays the one that is reported.
class capture_scope {
 public:
  /// Begins the capture. Throws capture_error if the stream is being captured already or cannot be
  /// captured (the legacy default stream).
  explicit capture_scope(cudaStream_t stream);
  ~capture_scope();
  capture_scope(const capture_scope&) = delete;
  capture_scope& operator=(const capture_scope&) = delete;

  /// The node that was captured last onto the stream. Throws capture_error if there is not exactly
  /// one.
  cudaGraphNode_t latest_node() const;

  /// Ends the capture and returns the graph. Throws capture_error if the capture was invalidated or
  /// no node was captured.
  unique_graph finish();

 private:
  cudaStream_t stream_;
  bool open_ = true;
};

/// Whether `stream` is being captured. Throws capture_error if its capture was invalidated.
bool is_capturing(cudaStream_t stream);

}  // namespace stepgraph::cuda
