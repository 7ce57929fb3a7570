#include "command.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <fstream>

#include "stepgraph/error.hpp"

namespace stepgraph::cli {
namespace {

std::string check_number(const std::string& text, bool (*accepts)(double), const char* wanted) {
  double value = 0.0;
  const bool is_number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
  return is_number && accepts(value) ? "" : fmt::format("'{}' is not {}", text, wanted);
}

}  // namespace

std::string check_positive(const std::string& text) {
  return check_number(
      text, [](double value) { return value > 0.0; }, "a positive number");
}

std::string check_not_negative(const std::string& text) {
  return check_number(
      text, [](double value) { return value >= 0.0; }, "a number of at least 0");
}

std::string check_beta(const std::string& text) {
  return check_number(
      text, [](double value) { return value >= 0.0 && value < 1.0; },
      "a number of at least 0 and below 1");
}

void add_norm_options(CLI::App& command, double& max_grad_norm, double& skip_above_norm) {
  command.add_option("--clip", max_grad_norm, "Largest gradient norm; 0: no clipping")
      ->check(check_not_negative);
  command
      .add_option("--skip-above-norm", skip_above_norm,
                  "Skip a step whose gradient norm is larger; 0: never")
      ->check(check_not_negative);
}

void require_writable(const std::string& path) {
  if (path.empty() || path == "-") return;
  if (!std::ofstream(path, std::ios::app)) throw error(fmt::format("cannot write '{}'", path));
}

void write_output(const std::string& path, const std::string& text) {
  if (path == "-") {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
        std::fflush(stdout) != 0) {
      throw error("cannot write to standard output");
    }
    return;
  }
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw error(fmt::format("cannot write '{}'", path));
}

}  // namespace stepgraph::cli
