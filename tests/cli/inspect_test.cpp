#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/run_program.hpp"
#include "parameter_lists.hpp"
#include "stepgraph/kernels/launch_shape.hpp"

namespace stepgraph::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

json inspect_json(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "inspect");
  arguments.insert(arguments.end(), {"--json", "-"});
  const program_result result = run_program(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return json::parse(result.out);
}

TEST(Inspect, PlainStepIsAnAdvanceAndAnUpdate) {
  const json plan = inspect_json({"--parameters", "gpt2-124m"});
  EXPECT_EQ(plan["tensors"], 148);
  EXPECT_EQ(plan["parameter_count"], 124'439'808);
  ASSERT_EQ(plan["nodes"].size(), 2u);
  EXPECT_EQ(plan["nodes"][0]["name"], "advance_step");
  EXPECT_EQ(plan["nodes"][1]["name"], "update/f32/f32/none/f32/f32");
  EXPECT_EQ(plan["nodes"][1]["tuned"], true);
  ASSERT_EQ(plan["edges"].size(), 1u);
  EXPECT_EQ(plan["edges"][0]["from"], "advance_step");
}

TEST(Inspect, BytesAndTimesOfAnF32Step) {
  constexpr std::uint64_t parameters = 124'439'808;
  const json plan = inspect_json({"--clip", "1", "--zero-gradients", "--bandwidth", "4000"});
  ASSERT_EQ(plan["nodes"].size(), 2u);
  const json& statistics = plan["nodes"][0];
  const json& update = plan["nodes"][1];
  EXPECT_EQ(statistics["name"], "grad_stats");
  EXPECT_EQ(statistics["bytes_read"], 4 * parameters);
  EXPECT_EQ(statistics["bytes_written"], 0);
  EXPECT_EQ(update["bytes_read"], 16 * parameters);
  EXPECT_EQ(update["bytes_written"], 16 * parameters);
  EXPECT_EQ(plan["bytes_read"], 20 * parameters);
  EXPECT_EQ(plan["bytes_written"], 16 * parameters);
  // 36 bytes an element over 4000 GB/s, in microseconds.
  EXPECT_NEAR(plan["predicted_us"].get<double>(), 36.0 * parameters / 4e6, 1e-6);
}

TEST(Inspect, MixedStorageMovesItsOwnBytes) {
  constexpr std::uint64_t parameters = 8'030'261'248;
  const json plan = inspect_json({"--parameters", "llama3-8b", "--parameter-format", "bf16",
                                  "--gradient-format", "bf16", "--master", "f32"});
  const json& update = plan["nodes"].back();
  EXPECT_EQ(plan["tensors"], 291);
  EXPECT_EQ(update["name"], "update/bf16/bf16/f32/f32/f32");
  EXPECT_EQ(update["signature"], "bf16/bf16/f32/f32/f32");
  // The parameter is only written; gradient, master and moments are read, all but the gradient
  // written.
  EXPECT_EQ(update["bytes_read"], (2 + 4 + 4 + 4) * parameters);
  EXPECT_EQ(update["bytes_written"], (2 + 4 + 4 + 4) * parameters);
}

TEST(Inspect, LaunchSizesFollowFromTheChunks) {
  std::uint64_t chunks = 0;
  for (const parameter_shape& parameter : gpt2_124m_parameters()) {
    chunks += chunk_count(parameter.numel());
  }
  const json plan = inspect_json({"--clip", "1"});
  EXPECT_EQ(plan["nodes"][0]["blocks"], statistics_blocks(chunks));
  EXPECT_EQ(plan["nodes"][1]["chunks"], chunks);
  EXPECT_EQ(plan["nodes"][1]["blocks"], chunks * update_blocks_per_chunk);
  EXPECT_EQ(plan["nodes"][1]["threads"], update_threads);
}

TEST(Inspect, UnlistedFormatsRunTheGenericKernel) {
  const json plan = inspect_json({"--parameter-format", "f16", "--gradient-format", "bf16"});
  EXPECT_EQ(plan["nodes"].back()["tuned"], false);
  const program_result text =
      run_program({"inspect", "--parameter-format", "f16", "--gradient-format", "bf16"});
  EXPECT_THAT(text.out, HasSubstr("generic"));
}

TEST(Inspect, ListOfShortVectorsHasTheLengthAskedFor) {
  EXPECT_EQ(inspect_json({"--parameters", "nx4096"})["parameter_count"], 148 * 4096);
  const json plan = inspect_json({"--parameters", "nx4096", "--tensors", "10"});
  EXPECT_EQ(plan["tensors"], 10);
  EXPECT_EQ(plan["parameter_count"], 40960);
}

TEST(Inspect, TextNamesNodesTotalsAndEdges) {
  const program_result result = run_program({"inspect", "--clip", "1", "--skip-non-finite"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, IsEmpty());
  EXPECT_THAT(result.out, StartsWith("gpt2-124m: 148 tensors, 124,439,808 parameters in 2 groups; "
                                     "clipping to norm 1, skipping of non-finite gradients on"));
  EXPECT_THAT(result.out, HasSubstr("update/f32/f32/none/f32/f32  tuned"));
  EXPECT_THAT(result.out, HasSubstr("grad_stats -> update/f32/f32/none/f32/f32"));
  // 20 bytes read and 12 written for each parameter.
  EXPECT_THAT(result.out, HasSubstr("2488.796"));
  EXPECT_THAT(result.out, HasSubstr("1493.278"));
}

TEST(Inspect, DotGoesToAFileBesideTheText) {
  const temporary_file dot;
  const program_result result = run_program({"inspect", "--clip", "1", "--dot", dot.path()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("gpt2-124m"));
  EXPECT_THAT(dot.read(), StartsWith("digraph"));
  EXPECT_THAT(dot.read(), HasSubstr("grad_stats"));
  EXPECT_THAT(dot.read(), HasSubstr("->"));
}

TEST(Inspect, DotAloneOnStandardOutput) {
  const program_result result = run_program({"inspect", "--dot", "-"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, StartsWith("digraph"));
  EXPECT_THAT(result.out, Not(HasSubstr("Predicted")));
}

TEST(Inspect, LastOfARepeatedOptionWins) {
  EXPECT_EQ(inspect_json({"--parameters", "llama3-8b", "--parameters", "nx4096"})["parameters"],
            "nx4096");
}

}  // namespace
}  // namespace stepgraph::test
