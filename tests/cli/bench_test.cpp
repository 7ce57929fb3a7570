#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/run_program.hpp"

namespace stepgraph::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json bench_json(std::vector<std::string> more) {
  more.insert(more.begin(), "bench");
  more.insert(more.end(), {"--repetitions", "1", "--json", "-"});
  const program_result result = run_program(more);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return result.exit_code == 0 ? json::parse(result.out) : json();
}

TEST(Bench, HostExecutorBesideMemcpy) {
  const json result = bench_json({"--device", "cpu", "--memory", "12"});
  EXPECT_EQ(result["executor"], "host");
  EXPECT_GT(result["copy_gb_s"], 0.0);
  // 148 vectors of 4,096 elements take 16, 16 and 8 bytes an element: the first two 9.7 MB.
  ASSERT_EQ(result["cases"].size(), 6u);
  EXPECT_GT(result["left_out"].size(), 0u);
  constexpr std::uint64_t elements = 148 * 4096;
  for (const json& measured : result["cases"]) {
    EXPECT_EQ(measured["tensors"], "148 x 4,096");
    EXPECT_EQ(measured["tensor_count"], 148);
    EXPECT_GT(measured["step_us"], 0.0);
    EXPECT_NEAR(measured["gb_s"].get<double>(),
                measured["bytes"].get<double>() / measured["step_us"].get<double>() * 1e-3, 1e-6);
    EXPECT_NEAR(measured["share_of_copy"].get<double>(),
                measured["gb_s"].get<double>() / result["copy_gb_s"].get<double>(), 1e-9);
    EXPECT_TRUE(measured["replay_cpu_us"].is_null());
  }
  EXPECT_EQ(result["cases"][0]["signature"], "f32/f32/none/f32/f32");
  EXPECT_EQ(result["cases"][0]["bytes"], 28 * elements);
  // Clipping reads the gradient once more, zeroing writes it.
  EXPECT_EQ(result["cases"][1]["bytes"], 36 * elements);
}

TEST(Bench, PrintsATable) {
  const program_result result =
      run_program({"bench", "--device", "cpu", "--memory", "6", "--repetitions", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("host executor on cpu; memcpy by all threads: "));
  EXPECT_THAT(result.out, HasSubstr("of the copy"));
  EXPECT_THAT(result.out, HasSubstr("bf16/bf16/none/bf16/bf16"));
  EXPECT_THAT(result.out, HasSubstr("Left out for their memory: "));
}

TEST(GpuBench, GraphExecutorBesideACopyOnTheDevice) {
  const json report = json::parse(run_program({"doctor", "--json", "-"}).out);
  if (report["graph_executor"] != true) GTEST_SKIP() << "no GPU";
  const json result = bench_json({"--device", "cuda", "--memory", "2500"});
  EXPECT_EQ(result["executor"], "graph");
  EXPECT_GT(result["cases"].size(), 6u);
  for (const json& measured : result["cases"]) {
    EXPECT_GT(measured["step_us"], 0.0);
    EXPECT_GT(measured["replay_cpu_us"], 0.0);
  }
}

TEST(Bench, ExplainsWhyThereIsNoGpu) {
  const json report = json::parse(run_program({"doctor", "--json", "-"}).out);
  if (report["graph_executor"] == true) GTEST_SKIP() << "this machine has a GPU that works";
  const program_result result = run_program({"bench", "--device", "cuda"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("stepgraph: error: --device cuda: "));
}

}  // namespace
}  // namespace stepgraph::test
