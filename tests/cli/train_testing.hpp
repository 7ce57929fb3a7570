#pragma once

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

#include "cli/run_program.hpp"

namespace stepgraph::test {

/// A text that a tiny model learns in a few steps.
inline std::string rhyme() {
  std::string text;
  for (int i = 0; i < 40; ++i) text += "The cat sat on the mat and the dog sat on the log. ";
  return text;
}

/// The arguments of a training that takes milliseconds a step.
inline std::vector<std::string> tiny(const temporary_file& text, std::vector<std::string> more) {
  std::vector<std::string> arguments = {"train",     "--text",  text.path(), "--batch", "4",
                                        "--context", "16",      "--layers",  "2",       "--heads",
                                        "2",         "--width", "16"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// The result of a training that has to succeed.
inline nlohmann::json train_json(std::vector<std::string> more) {
  const temporary_file text(rhyme());
  more.insert(more.end(), {"--json", "-"});
  const program_result result = run_program(tiny(text, std::move(more)));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return result.exit_code == 0 ? nlohmann::json::parse(result.out) : nlohmann::json();
}

}  // namespace stepgraph::test
