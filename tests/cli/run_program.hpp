#pragma once

#include <string>
#include <vector>

namespace stepgraph::test {

struct program_result {
  int exit_code = -1;  ///< -1: ended by a signal
  std::string out;
  std::string err;
};

/// Runs the command line program with one processor thread and neither stream a terminal.
program_result run_program(const std::vector<std::string>& arguments);

/// A file that is gone when the test is over.
class temporary_file {
 public:
  explicit temporary_file(const std::string& content = "");
  ~temporary_file();
  temporary_file(const temporary_file&) = delete;
  temporary_file& operator=(const temporary_file&) = delete;

  const std::string& path() const noexcept { return path_; }
  std::string read() const;

 private:
  std::string path_;
};

}  // namespace stepgraph::test
