#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/run_program.hpp"

namespace stepgraph::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json finding(const json& report, const std::string& topic) {
  for (const json& entry : report["findings"]) {
    if (entry["topic"] == topic) return entry;
  }
  return nullptr;
}

TEST(Doctor, TriesTheHostExecutor) {
  const temporary_file file;
  const program_result result = run_program({"doctor", "--json", file.path()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("host executor"));
  EXPECT_THAT(result.out, HasSubstr("Steps run on: "));

  const json report = json::parse(file.read());
  EXPECT_EQ(report["host_executor"], true);
  EXPECT_EQ(finding(report, "host executor")["state"], "ok");
  EXPECT_EQ(finding(report, "torch").is_null(), false);
}

TEST(Doctor, EveryFindingSaysSomething) {
  const program_result result = run_program({"doctor", "--json", "-"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json report = json::parse(result.out);
  ASSERT_GE(report["findings"].size(), 3u);
  for (const json& entry : report["findings"]) {
    EXPECT_FALSE(entry["text"].get<std::string>().empty()) << entry;
    EXPECT_NE(entry["state"], "unknown");
  }
}

TEST(Doctor, ExplainsAMissingGpu) {
  const json report = json::parse(run_program({"doctor", "--json", "-"}).out);
  if (report["graph_executor"] == true) GTEST_SKIP() << "this machine has a GPU that works";
  std::string reasons;
  for (const json& entry : report["findings"]) {
    if (entry["state"] != "ok") reasons += entry["text"].get<std::string>() + "\n";
  }
  EXPECT_THAT(reasons, ::testing::AnyOf(HasSubstr("no NVIDIA driver"), HasSubstr("without CUDA"),
                                        HasSubstr("none"), HasSubstr("GPU")));
}

TEST(GpuDoctor, ReportsKernelsAndTriesTheGraph) {
  const json report = json::parse(run_program({"doctor", "--json", "-"}).out);
  if (report["gpus"].empty()) GTEST_SKIP() << "no GPU";
  EXPECT_EQ(report["graph_executor"], true) << report["findings"];
  const json& gpu = report["gpus"][0];
  EXPECT_GT(gpu["multiprocessors"], 0);
  ASSERT_GT(gpu["kernels"].size(), 0u);
  for (const json& kernel : gpu["kernels"]) {
    EXPECT_GT(kernel["registers"], 0) << kernel;
    EXPECT_EQ(kernel["local_bytes"], 0) << kernel;
    EXPECT_GT(kernel["blocks_per_multiprocessor"], 0) << kernel;
  }
}

}  // namespace
}  // namespace stepgraph::test
