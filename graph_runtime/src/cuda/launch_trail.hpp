#pragma once

#include <cuda_runtime_api.h>

#include "stepgraph/cuda/handles.hpp"

namespace stepgraph::cuda {

/// Where the work of a step was enqueued last, so that what comes next can be ordered after it on
/// any stream. On one stream that costs nothing but what `record` says.
class launch_trail {
 public:
  /// Orders `stream`, which is not being captured, after everything so far. Waits for the device if
  /// no event tells the end of that and the stream is another one. Throws cuda_error.
  void follow(cudaStream_t stream);
  /// The same for a replay: the driver runs replays of one executable one after the other itself.
  void follow_by_replay(cudaStream_t stream);

  /// Work was enqueued onto `stream`, which has followed: notes its end by an event. The device of
  /// the stream is current, always the same. Throws cuda_error.
  void record(cudaStream_t stream);
  /// A replay was launched onto `stream`, which has followed; no call to the driver.
  void add_replay(cudaStream_t stream) noexcept { add(stream, end::of_a_replay); }
  /// Something may have been enqueued onto `stream`, which has followed, before an error.
  void add_unknown(cudaStream_t stream) noexcept { add(stream, end::unknown); }
  /// Everything so far has finished.
  void finished() noexcept { end_ = end::passed; }

  /// Whether there may be work whose end no event tells.
  bool unrecorded() const noexcept { return end_ == end::of_a_replay || end_ == end::unknown; }

 private:
  /// What is known of the end of the latest work.
  enum class end {
    passed,
    recorded,     ///< the event tells it
    of_a_replay,  ///< nothing tells it; it comes after everything before the replay
    unknown,
  };

  void add(cudaStream_t stream, end of_it) noexcept {
    stream_ = stream;
    end_ = of_it;
  }
  bool continues(cudaStream_t stream) const noexcept {
    return end_ == end::passed || stream_ == stream;
  }

  unique_event event_;
  cudaStream_t stream_ = nullptr;
  end end_ = end::passed;
};

}  // namespace stepgraph::cuda
