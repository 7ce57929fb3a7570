#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <string>

namespace stepgraph::cli {

/// A command of the program: its options, and what it does once they are parsed.
struct command {
  CLI::App* options = nullptr;
  std::function<int()> run;  ///< returns the exit code; throws CLI::Error for wrong usage
};

inline constexpr int exit_success = 0;
inline constexpr int exit_failure = 1;
inline constexpr int exit_usage = 2;

command add_train(CLI::App& program);
command add_inspect(CLI::App& program);
command add_bench(CLI::App& program);
command add_doctor(CLI::App& program);

/// Checks of option values. CLI11's own ranges let NaN pass.
std::string check_positive(const std::string& text);
std::string check_not_negative(const std::string& text);
std::string check_beta(const std::string& text);

/// Adds --clip and --skip-above-norm.
void add_norm_options(CLI::App& command, double& max_grad_norm, double& skip_above_norm);

/// Throws stepgraph::error if `path` cannot be written: before hours of work, not after. Makes an
/// empty file where there was none. Nothing to check for "-" and "".
void require_writable(const std::string& path);

/// Writes `text` to a file, or to standard output for "-". Throws stepgraph::error.
void write_output(const std::string& path, const std::string& text);

}  // namespace stepgraph::cli
