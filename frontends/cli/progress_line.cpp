#include "progress_line.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace stepgraph::cli {
namespace {

std::size_t terminal_width() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

progress_line::progress_line(std::string label, std::int64_t total)
    : label_(std::move(label)), total_(total), terminal_(isatty(STDERR_FILENO) == 1) {}

progress_line::~progress_line() {
  if (line_open_) std::fputc('\n', stderr);
}

void progress_line::update(std::int64_t done, const std::string& text) {
  const clock::time_point now = clock::now();
  const double elapsed = std::chrono::duration<double>(now - started_).count();
  if (terminal_) {
    if (done < total_ && now - drawn_ < std::chrono::milliseconds(100)) return;
    drawn_ = now;
    redraw(done, text, elapsed);
    return;
  }
  const std::int64_t tenths = done * 10 / total_;
  if (tenths == reported_tenths_ && done != 1) return;
  reported_tenths_ = tenths;
  fmt::print(stderr, "{} {}/{}  {}  {} elapsed\n", label_, done, total_, text, duration(elapsed));
}

void progress_line::redraw(std::int64_t done, const std::string& text, double elapsed) {
  constexpr std::int64_t cells = 24;
  const std::int64_t filled = done * cells / total_;
  const double remaining = elapsed / static_cast<double>(done) * static_cast<double>(total_ - done);
  std::string line = fmt::format("{} [{}{}] {}/{}  {}  {} left", label_,
                                 std::string(static_cast<std::size_t>(filled), '#'),
                                 std::string(static_cast<std::size_t>(cells - filled), '.'), done,
                                 total_, text, duration(remaining));
  // A line that wraps cannot be redrawn in place.
  line.resize(std::min(line.size(), terminal_width() - 1));
  fmt::print(stderr, "\r{}\x1b[K", line);
  std::fflush(stderr);
  line_open_ = true;
}

}  // namespace stepgraph::cli
