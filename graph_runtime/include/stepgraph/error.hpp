#pragma once

#include <stdexcept>
#include <string>

namespace stepgraph {

/// Base of everything the library throws. The message names the tensor, option or node concerned,
/// what was expected and what was found. After any of these the executor, the stream and the
/// process stay usable unless the declaration of the call says otherwise.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A request that cannot be served as asked: wrong sizes, formats, options, missing tensors.
class usage_error : public error {
 public:
  using error::error;
};

/// A CUDA call failed.
class cuda_error : public error {
 public:
  cuda_error(const std::string& message, int status) : error(message), status_(status) {}

  /// The cudaError_t of the call.
  int status() const noexcept { return status_; }

 private:
  int status_;
};

/// A stream capture was refused, invalidated or left empty.
class capture_error : public error {
 public:
  using error::error;
};

/// A change to an instantiated graph was refused; the graph still runs as before.
class update_error : public error {
 public:
  using error::error;
};

}  // namespace stepgraph
