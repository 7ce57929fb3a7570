// Checkpoints of a training: saved, refused, and resumed to the same bits.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>

#include "cli/train_testing.hpp"

namespace stepgraph::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

/// The same training, whose schedule does not depend on where it stops.
std::vector<std::string> training(std::vector<std::string> more) {
  more.insert(more.end(), {"--lr", "0.02", "--warmup", "2", "--decay-steps", "12"});
  return more;
}

json run(const std::vector<std::string>& options, std::vector<std::string> more) {
  more.insert(more.end(), options.begin(), options.end());
  return train_json(training(std::move(more)));
}

void expect_resume_equals_uninterrupted_run(const std::vector<std::string>& options, int saved_at) {
  const temporary_file checkpoint;
  const json uninterrupted = run(options, {"--steps", "12"});
  const json first =
      run(options, {"--steps", std::to_string(saved_at), "--save", checkpoint.path()});
  const json second = run(options, {"--steps", "12", "--resume", checkpoint.path()});

  EXPECT_EQ(first["checkpoint"], checkpoint.path());
  EXPECT_EQ(second["first_step"], saved_at + 1);
  EXPECT_EQ(second["parameters_digest"], uninterrupted["parameters_digest"]);
  EXPECT_EQ(second["state_digest"], uninterrupted["state_digest"]);
  EXPECT_EQ(second["final_loss_scale"], uninterrupted["final_loss_scale"]);
  EXPECT_NE(first["parameters_digest"], uninterrupted["parameters_digest"]);
  for (const char* list :
       {"losses", "learning_rates", "weight_decays", "grad_norms", "loss_scales"}) {
    json joined = first[list];
    joined.insert(joined.end(), second[list].begin(), second[list].end());
    EXPECT_EQ(joined, uninterrupted[list]) << list;
  }
}

TEST(TrainResume, F32OnTheCpuGivesTheSameBits) {
  expect_resume_equals_uninterrupted_run({"--device", "cpu"}, 5);
}

TEST(TrainResume, F16WithDynamicScalingGivesTheSameBits) {
  const std::vector<std::string> options = {"--device",
                                            "cpu",
                                            "--dtype",
                                            "f16",
                                            "--loss-scale",
                                            "1048576",
                                            "--growth-interval",
                                            "3",
                                            "--weight-decay-schedule",
                                            "cosine",
                                            "--weight-decay-end",
                                            "0.3",
                                            "--weight-decay-steps",
                                            "12"};
  const json skipped = run(options, {"--steps", "12"})["skipped_steps"];
  ASSERT_FALSE(skipped.empty());
  // Right after a skipped step, and between.
  for (const int saved_at : {skipped[0].get<int>(), 7}) {
    expect_resume_equals_uninterrupted_run(options, saved_at);
  }
}

TEST(TrainResume, Bf16GivesTheSameBits) {
  expect_resume_equals_uninterrupted_run({"--device", "cpu", "--dtype", "bf16"}, 4);
}

TEST(GpuTrainResume, F16WithDynamicScalingGivesTheSameBits) {
  const json report = json::parse(run_program({"doctor", "--json", "-"}).out);
  if (report["graph_executor"] != true) GTEST_SKIP() << "no GPU";
  expect_resume_equals_uninterrupted_run(
      {"--device", "cuda", "--dtype", "f16", "--loss-scale", "1048576", "--growth-interval", "3"},
      5);
}

TEST(TrainResume, SavesEverySoManySteps) {
  const temporary_file checkpoint;
  const std::string path = checkpoint.path();
  // The last one that is due is at the end.
  const json result =
      run({"--device", "cpu"}, {"--steps", "5", "--save", path, "--save-every", "2"});
  EXPECT_EQ(result["checkpoint"], path);
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));
  const json resumed = run({"--device", "cpu"}, {"--steps", "6", "--resume", path});
  EXPECT_EQ(resumed["first_step"], 6);
  EXPECT_EQ(resumed["losses"].size(), 1u);
}

TEST(TrainResume, RefusesAnotherTrainingAndNamesTheOption) {
  const temporary_file text(rhyme());
  const temporary_file checkpoint;
  const auto try_to = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--device", "cpu"});
    return run_program(tiny(text, training(std::move(more))));
  };
  ASSERT_EQ(try_to({"--steps", "2", "--save", checkpoint.path()}).exit_code, 0);
  const auto expect_refused = [&](const std::vector<std::string>& more, const char* message) {
    std::vector<std::string> arguments = {"--steps", "4", "--resume", checkpoint.path()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const program_result result = try_to(arguments);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr(message));
  };
  expect_refused({"--layers", "1"}, "with --layers 2, expected 1");
  expect_refused({"--dtype", "bf16"}, "with --dtype f32, expected bf16");
  expect_refused({"--schedule", "linear"}, "with --schedule ");
  expect_refused({"--seed", "9"}, "with --seed 1, expected 9");
  expect_refused({"--steps", "2"}, "is at step 2, nothing is left of --steps 2");
}

TEST(TrainResume, RefusesWhatIsNoCheckpoint) {
  const temporary_file text(rhyme());
  const program_result other =
      run_program(tiny(text, {"--device", "cpu", "--resume", text.path()}));
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.err, HasSubstr("is not a checkpoint of this program"));
  const program_result missing =
      run_program(tiny(text, {"--device", "cpu", "--resume", "/nowhere/checkpoint"}));
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_THAT(missing.err, HasSubstr("there is no file '/nowhere/checkpoint'"));
}

TEST(TrainResume, RefusesAnUnwritableCheckpointBeforeTraining) {
  const temporary_file text(rhyme());
  const program_result result = run_program(
      tiny(text, {"--steps", "1000000", "--device", "cpu", "--save", "/nowhere/checkpoint"}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("cannot write '/nowhere/checkpoint'"));
}

}  // namespace
}  // namespace stepgraph::test
