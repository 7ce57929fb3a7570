#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace stepgraph::python {

/// A Python callable that an executor calls, and drops, without holding the GIL.
class python_callback {
 public:
  python_callback(std::string name, nanobind::object callable)
      : name_(std::move(name)), callable_(std::move(callable)) {}
  ~python_callback();
  python_callback(const python_callback&) = delete;
  python_callback& operator=(const python_callback&) = delete;

  const std::string& name() const noexcept { return name_; }

  /// Takes the GIL. What Python raises passes through as nanobind::python_error.
  template <class... Arguments>
  void operator()(Arguments... arguments) const {
    const nanobind::gil_scoped_acquire gil;
    if (callable_) callable_(arguments...);
  }

  /// For Python's garbage collector, which holds the GIL.
  nanobind::handle callable() const noexcept { return callable_; }
  void clear() noexcept { callable_.reset(); }

 private:
  std::string name_;
  nanobind::object callable_;
};

using callback_list = std::vector<std::shared_ptr<python_callback>>;

/// From a mapping of names to callables, or None. Throws nanobind::type_error, naming the entry.
callback_list callbacks_from(const nanobind::object& foreign);

}  // namespace stepgraph::python
