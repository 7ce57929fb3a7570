#include "cli/run_program.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace stepgraph::test {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

program_result run_program(const std::vector<std::string>& arguments) {
  const temporary_file out;
  const temporary_file err;

  std::vector<std::string> words = {STEPGRAPH_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  // Tests run side by side; each with every core would be slower together.
  std::string threads = "OMP_NUM_THREADS=1";
  std::vector<char*> environment = {threads.data()};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!std::string_view(*entry).starts_with("OMP_NUM_THREADS=")) environment.push_back(*entry);
  }
  environment.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.path().c_str(), O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.path().c_str(), O_WRONLY, 0);
  pid_t process = 0;
  const int failure =
      posix_spawn(&process, STEPGRAPH_PROGRAM, &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (failure != 0) throw std::system_error(failure, std::generic_category(), STEPGRAPH_PROGRAM);

  int status = 0;
  if (waitpid(process, &status, 0) != process) throw std::runtime_error("waitpid failed");
  return {.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          .out = read_file(out.path()),
          .err = read_file(err.path())};
}

temporary_file::temporary_file(const std::string& content)
    : path_((std::filesystem::temp_directory_path() / "stepgraph-test-XXXXXX").string()) {
  const int descriptor = mkstemp(path_.data());
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), path_);
  close(descriptor);
  std::ofstream(path_, std::ios::binary) << content;
}

temporary_file::~temporary_file() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

std::string temporary_file::read() const { return read_file(path_); }

}  // namespace stepgraph::test
