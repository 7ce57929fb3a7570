#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/run_program.hpp"
#include "cli/train_testing.hpp"

namespace stepgraph::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

#if defined(STEPGRAPH_HAS_TORCH)

void expect_same_as_reference(const json& result) {
  EXPECT_LT(result["max_loss_difference"].get<double>(), 1e-4) << result.dump(2);
  EXPECT_EQ(result["losses"][0], result["reference_losses"][0]);
}

TEST(Train, FollowsTheReferenceOptimizer) {
  const json result = train_json({"--steps", "3", "--device", "cpu", "--compare"});
  EXPECT_EQ(result["backend"], "host");
  EXPECT_EQ(result["device"], "cpu");
  EXPECT_EQ(result["steps"], 3);
  EXPECT_EQ(result["losses"].size(), 3u);
  EXPECT_EQ(result["reference_losses"].size(), 3u);
  EXPECT_EQ(result["first_loss"], result["losses"][0]);
  EXPECT_EQ(result["final_loss"], result["losses"][2]);
  EXPECT_EQ(result["reference_final_loss"], result["reference_losses"][2]);
  EXPECT_TRUE(result["replay_launch_us"].is_null());
  EXPECT_GT(result["optimizer_step_us"], 0.0);
  EXPECT_GT(result["reference_optimizer_step_us"], 0.0);
  expect_same_as_reference(result);
}

TEST(Train, LossFalls) {
  const json result = train_json({"--steps", "30", "--lr", "0.02", "--device", "cpu", "--compare"});
  EXPECT_LT(result["final_loss"].get<double>(), result["first_loss"].get<double>() - 0.5);
  expect_same_as_reference(result);
}

TEST(Train, FollowsTheReferenceWithoutClippingDecayAndWarmup) {
  expect_same_as_reference(
      train_json({"--steps", "10", "--clip", "0", "--weight-decay", "0", "--warmup", "0",
                  "--schedule", "constant", "--device", "cpu", "--compare"}));
}

TEST(Train, ClippingFollowsTheReferenceWhenItBites) {
  const json clipped = train_json(
      {"--steps", "10", "--clip", "0.01", "--eps", "1e-3", "--device", "cpu", "--compare"});
  const json free =
      train_json({"--steps", "10", "--clip", "0", "--eps", "1e-3", "--device", "cpu"});
  expect_same_as_reference(clipped);
  EXPECT_NE(clipped["final_loss"], free["final_loss"]);
}

TEST(Train, ReferenceKeysAreNullWithoutComparison) {
  const json result = train_json({"--steps", "2", "--device", "cpu"});
  for (const char* key : {"reference_final_loss", "max_loss_difference",
                          "reference_optimizer_step_us", "reference_losses"}) {
    ASSERT_TRUE(result.contains(key)) << key;
    EXPECT_TRUE(result[key].is_null()) << key;
  }
}

TEST(Train, SameSeedSameLosses) {
  const json one = train_json({"--steps", "4", "--seed", "5", "--device", "cpu"});
  const json two = train_json({"--steps", "4", "--seed", "5", "--device", "cpu"});
  const json other = train_json({"--steps", "4", "--seed", "6", "--device", "cpu"});
  EXPECT_EQ(one["losses"], two["losses"]);
  EXPECT_NE(one["losses"], other["losses"]);
}

TEST(Train, LearningRatesFollowTheSchedule) {
  const std::vector<std::string> common = {"--steps", "9",        "--warmup", "4",        "--lr",
                                           "0.01",    "--min-lr", "0.002",    "--device", "cpu"};
  const auto rates = [&](const char* shape) {
    std::vector<std::string> arguments = common;
    arguments.insert(arguments.end(), {"--schedule", shape});
    return train_json(arguments)["learning_rates"].get<std::vector<double>>();
  };
  const std::vector<double> warmup = {0.002, 0.004, 0.006, 0.008};
  const std::vector<double> constant = {0.01, 0.01, 0.01, 0.01, 0.01};
  const std::vector<double> linear = {0.01, 0.008, 0.006, 0.004, 0.002};
  const std::vector<double> cosine = {0.01, 0.0088284271247461907, 0.006, 0.0031715728752538097,
                                      0.002};
  const auto expect = [&](const char* shape, const std::vector<double>& after) {
    const std::vector<double> found = rates(shape);
    ASSERT_EQ(found.size(), 9u);
    for (std::size_t i = 0; i < 9; ++i) {
      EXPECT_NEAR(found[i], i < 4 ? warmup[i] : after[i - 4], 1e-12) << shape << " step " << i;
    }
  };
  expect("constant", constant);
  expect("linear", linear);
  expect("cosine", cosine);
}

TEST(Train, OneStepUsesTheLearningRate) {
  const json result = train_json({"--steps", "1", "--lr", "0.01", "--device", "cpu"});
  EXPECT_DOUBLE_EQ(result["learning_rates"][0].get<double>(), 0.01);
}

TEST(Train, ReportsInWordsAndLogsItsProgress) {
  const temporary_file text(rhyme());
  const program_result result =
      run_program(tiny(text, {"--steps", "20", "--device", "cpu", "--compare"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("20 steps on cpu by the host executor"));
  EXPECT_THAT(result.out, HasSubstr("torch::optim::AdamW"));
  EXPECT_THAT(result.out, HasSubstr("largest difference"));
  // Not a terminal: a line a tenth, and no line that is drawn over.
  EXPECT_THAT(result.err, HasSubstr("stepgraph 20/20  loss "));
  EXPECT_THAT(result.err, ::testing::Not(HasSubstr("\r")));
}

TEST(Train, StopsWhenTheLossIsNotFinite) {
  const temporary_file text(rhyme());
  const program_result result =
      run_program(tiny(text, {"--steps", "40", "--lr", "1e30", "--clip", "0", "--device", "cpu"}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("is not finite; try a smaller --lr"));
}

TEST(Train, RefusesATextThatIsTooShort) {
  const temporary_file text("short");
  const program_result result = run_program(tiny(text, {"--device", "cpu"}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("stepgraph: error: the text is too short"));
}

TEST(Train, RefusesAnEmptyText) {
  const temporary_file text;
  const program_result result = run_program(tiny(text, {"--device", "cpu"}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("is empty"));
}

TEST(Train, RefusesAMissingText) {
  const program_result result = run_program({"train", "--text", "/nowhere/text"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("'/nowhere/text': there is no such file"));
}

TEST(Train, RefusesAnUnwritableResultBeforeTraining) {
  const temporary_file text(rhyme());
  const program_result result =
      run_program(tiny(text, {"--steps", "1000000", "--json", "/nowhere/result.json"}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("cannot write '/nowhere/result.json'"));
}

TEST(GpuTrain, FollowsTheReferenceOptimizer) {
  const json report = json::parse(run_program({"doctor", "--json", "-"}).out);
  if (report["graph_executor"] != true) GTEST_SKIP() << "no GPU";
  const json result =
      train_json({"--steps", "30", "--lr", "0.02", "--device", "cuda", "--compare"});
  EXPECT_EQ(result["backend"], "graph");
  EXPECT_GT(result["replay_launch_us"], 0.0);
  EXPECT_LT(result["final_loss"].get<double>(), result["first_loss"].get<double>() - 0.5);
  EXPECT_LT(result["max_loss_difference"].get<double>(), 1e-3);
}

TEST(Train, ExplainsWhyThereIsNoGpu) {
  const json report = json::parse(run_program({"doctor", "--json", "-"}).out);
  if (report["graph_executor"] == true) GTEST_SKIP() << "this machine has a GPU that works";
  const temporary_file text(rhyme());
  const program_result result = run_program(tiny(text, {"--steps", "1", "--device", "cuda"}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("stepgraph: error: --device cuda: "));
}

#else

TEST(Train, SaysThatItWasBuiltWithoutTorch) {
  const temporary_file text(rhyme());
  const program_result result = run_program(tiny(text, {}));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("built without torch"));
}

#endif

}  // namespace
}  // namespace stepgraph::test
