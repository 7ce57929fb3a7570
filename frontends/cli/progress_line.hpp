#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace stepgraph::cli {

/// Shows on standard error how far a loop is: one line that is redrawn on a terminal, a line every
/// tenth of the way elsewhere.
class progress_line {
 public:
  progress_line(std::string label, std::int64_t total);
  /// Ends the line, so that what is printed next starts on its own.
  ~progress_line();
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;

  /// `done` of the total are done; `text` says how it is going.
  void update(std::int64_t done, const std::string& text);

 private:
  using clock = std::chrono::steady_clock;

  void redraw(std::int64_t done, const std::string& text, double elapsed);

  std::string label_;
  std::int64_t total_;
  bool terminal_;
  bool line_open_ = false;
  std::int64_t reported_tenths_ = 0;
  clock::time_point started_ = clock::now();
  clock::time_point drawn_{};
};

}  // namespace stepgraph::cli
