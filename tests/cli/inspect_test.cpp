#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>

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
  // One more, which prepares the step meanwhile.
  EXPECT_EQ(plan["nodes"][0]["blocks"], statistics_blocks(chunks) + 1);
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

TEST(Inspect, OptionsOfTheStep) {
  const json plan =
      inspect_json({"--skip-above-norm", "5", "--norm", "infinity", "--separate-norms",
                    "--count-zeros", "--loss-scaling", "megatron", "--growth-interval", "7",
                    "--unscale-gradients", "--records", "64", "--samples-per-step", "8"});
  EXPECT_EQ(plan["nodes"][0]["kind"], "grad_stats");
  const json& options = plan["options"];
  EXPECT_EQ(options["norm"], "infinity");
  EXPECT_EQ(options["measures_gradients"], true);
  EXPECT_EQ(options["skips_non_finite"], true);
  EXPECT_EQ(options["skip_above_norm"], 5.0);
  EXPECT_EQ(options["count_zeros"], true);
  EXPECT_EQ(options["loss_scale"], 4294967296.0);
  EXPECT_EQ(options["loss_scaling"], "megatron");
  EXPECT_EQ(options["growth_interval"], 7);
  EXPECT_EQ(options["unscale_gradients"], true);
  EXPECT_EQ(options["record_capacity"], 64);
  EXPECT_EQ(options["samples_per_step"], 8);
  EXPECT_EQ(plan["norm_groups"], json({"matrices", "vectors"}));
  EXPECT_EQ(plan["group_list"][1]["norm_group"], "vectors");

  const program_result text = run_program({"inspect", "--skip-above-norm", "5", "--count-zeros",
                                           "--loss-scaling", "torch", "--records", "64"});
  EXPECT_THAT(text.out, HasSubstr("norm of the gradient: l2, in 1 norm group\n"));
  EXPECT_THAT(text.out, HasSubstr("skipped: a norm above 5"));
  EXPECT_THAT(text.out, HasSubstr("zeros of the gradient are counted"));
  EXPECT_THAT(text.out, HasSubstr("loss scale: 65536 at first, by the rule of torch: times 2 after "
                                  "2000 finite steps in a row, times 0.5 after one that is not"));
  EXPECT_THAT(text.out, HasSubstr("records: of the last 64 steps"));
}

TEST(Inspect, ExchangedTotalsTakeAnAdvanceOfTheirOwn) {
  const json plan = inspect_json({"--clip", "1", "--exchange-totals"});
  ASSERT_EQ(plan["nodes"].size(), 3u);
  EXPECT_EQ(plan["nodes"][0]["kind"], "grad_stats");
  EXPECT_EQ(plan["nodes"][1]["kind"], "advance_step");
  EXPECT_EQ(plan["nodes"][2]["kind"], "update");
}

TEST(Inspect, ForeignWorkHasItsPlace) {
  const std::vector<std::string> arguments = {"--clip",    "1",
                                              "--foreign", "all_reduce=before:grad_stats",
                                              "--foreign", "log=applied:grad_stats"};
  const json plan = inspect_json(arguments);
  ASSERT_EQ(plan["nodes"].size(), 4u);
  EXPECT_EQ(plan["nodes"][0]["name"], "all_reduce");
  EXPECT_EQ(plan["nodes"][0]["kind"], "foreign");
  EXPECT_EQ(plan["nodes"][0]["only_if_applied"], false);
  EXPECT_EQ(plan["nodes"][2]["name"], "log");
  EXPECT_EQ(plan["nodes"][2]["only_if_applied"], true);
  EXPECT_EQ(plan["edges"][0]["programmatic"], false);
  std::vector<std::string> words = {"inspect"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  EXPECT_THAT(run_program(words).out, HasSubstr("log                          yours, if applied"));
}

TEST(Inspect, GradientWithoutParameterIsScaledApart) {
  const json plan =
      inspect_json({"--clip", "1", "--unscale-gradients", "--extra-gradients", "1000"});
  const auto is_scaling = [](const json& node) { return node["kind"] == "scale_gradients"; };
  const auto scaling = std::find_if(plan["nodes"].begin(), plan["nodes"].end(), is_scaling);
  ASSERT_NE(scaling, plan["nodes"].end());
  EXPECT_EQ((*scaling)["bytes_read"], 4000);
  EXPECT_EQ(plan["tensors"], 149);
  EXPECT_EQ(plan["parameter_count"], 124'439'808);
}

TEST(Inspect, SchedulesOfTheGroups) {
  const std::vector<std::string> arguments = {"--schedule",
                                              "step",
                                              "--lr",
                                              "0.5",
                                              "--step-size",
                                              "10",
                                              "--gamma",
                                              "0.1",
                                              "--weight-decay",
                                              "0",
                                              "--weight-decay-schedule",
                                              "linear",
                                              "--weight-decay-end",
                                              "0.25",
                                              "--steps",
                                              "101"};
  const json groups = inspect_json(arguments)["group_list"];
  EXPECT_EQ(groups[0]["learning_rate_schedule"]["clock"], "updates");
  EXPECT_EQ(groups[0]["learning_rate_schedule"]["segments"],
            json({"from update 0: step_decay 1 times 0.1 every 10, all times 0.5"}));
  EXPECT_EQ(groups[0]["weight_decay_schedule"]["segments"][0],
            "from update 0: linear 0 to 0.25 over 100 from 0");
  EXPECT_TRUE(groups[1]["weight_decay_schedule"].is_null());
  EXPECT_EQ(groups[1]["weight_decay"], 0.0);
  std::vector<std::string> words = {"inspect"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  EXPECT_THAT(run_program(words).out,
              HasSubstr("learning rate by schedule\n      from update 0: step_decay 1 times 0.1"));
  EXPECT_TRUE(inspect_json({})["group_list"][0]["learning_rate_schedule"].is_null());
}

TEST(Inspect, DotShowsTheOptions) {
  const program_result result = run_program({"inspect", "--skip-above-norm", "5", "--dot", "-"});
  EXPECT_THAT(result.out, StartsWith("digraph"));
  EXPECT_THAT(result.out, HasSubstr("skipped: a norm above 5\\l"));
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
