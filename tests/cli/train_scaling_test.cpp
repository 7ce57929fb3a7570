// Types, loss scaling, skips and schedules of a training.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>

#include "cli/train_testing.hpp"

namespace stepgraph::test {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<double> numbers(const json& list) { return list.get<std::vector<double>>(); }

/// Every skipped step and no other has an infinite norm, and the scale follows the rule of torch.
void expect_torch_scaling(const json& result, double first, int interval) {
  double scale = first;
  int finite = 0;
  std::vector<std::int64_t> skipped;
  for (std::size_t i = 0; i < result["losses"].size(); ++i) {
    EXPECT_EQ(result["loss_scales"][i], scale) << "step " << i + 1;
    const bool overflowed = result["grad_norms"][i].is_null();
    if (overflowed) skipped.push_back(static_cast<std::int64_t>(i) + 1);
    finite = overflowed ? 0 : finite + 1;
    if (overflowed) scale *= 0.5;
    if (finite == interval) {
      scale *= 2.0;
      finite = 0;
    }
  }
  EXPECT_EQ(result["final_loss_scale"], scale);
  EXPECT_EQ(result["skipped_steps"].get<std::vector<std::int64_t>>(), skipped);
}

TEST(TrainScaling, F16OverflowsAndGoesOn) {
  const json result =
      train_json({"--steps", "30", "--lr", "0.02", "--device", "cpu", "--dtype", "f16",
                  "--loss-scale", "1048576", "--growth-interval", "8", "--compare"});
  EXPECT_EQ(result["dtype"], "f16");
  EXPECT_EQ(result["loss_scaling"], "torch");
  EXPECT_GT(result["skipped_steps"].size(), 1u);
  EXPECT_LT(result["skipped_steps"].size(), 10u);
  expect_torch_scaling(result, 1048576.0, 8);
  EXPECT_LT(result["final_loss"].get<double>(), result["first_loss"].get<double>() - 0.5);
  // The reference scales, skips and counts on the host, with f32 copies of its own.
  EXPECT_EQ(result["reference_skipped_steps"], result["skipped_steps"]);
  EXPECT_LT(result["max_loss_difference"].get<double>(), 0.02);
}

TEST(TrainScaling, Bf16FollowsTheReferenceWithMasters) {
  const json result = train_json(
      {"--steps", "20", "--lr", "0.02", "--device", "cpu", "--dtype", "bf16", "--compare"});
  EXPECT_EQ(result["dtype"], "bf16");
  EXPECT_EQ(result["loss_scaling"], "none");
  EXPECT_LT(result["max_loss_difference"].get<double>(), 0.05);
  EXPECT_LT(result["final_loss"].get<double>(), result["first_loss"].get<double>() - 0.5);
}

TEST(TrainScaling, PowersOfTwoChangeNothingInF32) {
  const std::vector<std::string> common = {"--steps", "6", "--device", "cpu"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), common.begin(), common.end());
    return train_json(more);
  };
  const json plain = with({});
  const json scaled =
      with({"--loss-scaling", "megatron", "--loss-scale", "65536", "--growth-interval", "2"});
  EXPECT_EQ(scaled["parameters_digest"], plain["parameters_digest"]);
  EXPECT_EQ(scaled["state_digest"], plain["state_digest"]);
  EXPECT_EQ(scaled["final_loss_scale"], 8.0 * 65536.0);
  EXPECT_EQ(plain["final_loss_scale"], 1.0);
}

TEST(TrainScaling, NormAboveTheThresholdIsSkippedAndReported) {
  const json free =
      train_json({"--steps", "6", "--device", "cpu", "--clip", "0", "--skip-above-norm", "1000"});
  EXPECT_TRUE(free["skipped_steps"].empty());
  const double first_norm = free["grad_norms"][0].get<double>();
  EXPECT_GT(first_norm, 0.0);
  const json skipping =
      train_json({"--steps", "3", "--device", "cpu", "--clip", "0", "--skip-above-norm",
                  std::to_string(0.01 * first_norm), "--compare"});
  EXPECT_THAT(skipping["skipped_steps"].get<std::vector<int>>(), ElementsAre(1, 2, 3));
  EXPECT_EQ(skipping["reference_skipped_steps"], skipping["skipped_steps"]);
}

TEST(TrainScaling, ProgressComesFromTheRecords) {
  const temporary_file text(rhyme());
  const program_result result =
      run_program(tiny(text, {"--steps", "4", "--device", "cpu", "--dtype", "f16"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("scale 65536  norm "));
  EXPECT_THAT(result.out, HasSubstr("loss scale 65536 -> 65536"));
}

std::vector<double> rates(std::vector<std::string> schedule) {
  schedule.insert(schedule.end(), {"--lr", "0.01", "--device", "cpu"});
  return numbers(train_json(std::move(schedule))["learning_rates"]);
}

void expect_rates(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 1e-12) << "step " << i + 1;
  }
}

TEST(TrainScaling, SchedulesOfMegatron) {
  expect_rates(rates({"--steps", "5", "--schedule", "inverse-square-root", "--warmup", "0",
                      "--min-lr", "0"}),
               {0.01, 0.01, 0.01 / std::sqrt(2.0), 0.01 / std::sqrt(3.0), 0.005});
  expect_rates(rates({"--steps", "6", "--schedule", "wsd", "--warmup", "1", "--min-lr", "0.002",
                      "--wsd-decay-steps", "2", "--wsd-style", "linear"}),
               {0.005, 0.01, 0.01, 0.01, 0.006, 0.002});
  expect_rates(rates({"--steps", "5", "--schedule", "linear", "--warmup", "0", "--min-lr", "0.006",
                      "--decay-steps", "3"}),
               {0.01, 0.008, 0.006, 0.006, 0.006});
}

TEST(TrainScaling, SchedulesOfTorch) {
  expect_rates(rates({"--steps", "4", "--schedule", "step", "--step-size", "2", "--gamma", "0.5"}),
               {0.01, 0.01, 0.005, 0.005});
  expect_rates(
      rates({"--steps", "4", "--schedule", "multistep", "--milestones", "1,3", "--gamma", "0.5"}),
      {0.01, 0.005, 0.005, 0.0025});
  expect_rates(rates({"--steps", "3", "--schedule", "exponential", "--gamma", "0.5"}),
               {0.01, 0.005, 0.0025});
  expect_rates(rates({"--steps", "4", "--schedule", "polynomial", "--power", "2"}),
               {0.01, 0.005625, 0.0025, 0.000625});
  expect_rates(rates({"--steps", "4", "--schedule", "cosine-restarts", "--restart-period", "2",
                      "--min-lr", "0"}),
               {0.01, 0.005, 0.01, 0.005});
  expect_rates(rates({"--steps", "5", "--schedule", "one-cycle", "--rising-share", "0.6",
                      "--div-factor", "10", "--final-div-factor", "10"}),
               {0.001, 0.0055, 0.01, 0.00505, 0.0001});
  // A warm-up of two steps, and the schedule's own clock after it.
  expect_rates(rates({"--steps", "5", "--schedule", "step", "--step-size", "2", "--gamma", "0.5",
                      "--warmup", "2"}),
               {0.01 / 3.0, 0.02 / 3.0, 0.01, 0.01, 0.005});
}

TEST(TrainScaling, ScheduleFromATable) {
  const temporary_file table("0.5 0.25\n0.125\n");
  expect_rates(rates({"--steps", "4", "--schedule", "table:" + table.path()}),
               {0.5, 0.25, 0.125, 0.125});
}

TEST(TrainScaling, WeightDecaySchedule) {
  const json result =
      train_json({"--steps", "5", "--device", "cpu", "--weight-decay", "0",
                  "--weight-decay-schedule", "linear", "--weight-decay-end", "0.4", "--compare"});
  expect_rates(numbers(result["weight_decays"]), {0.0, 0.1, 0.2, 0.3, 0.4});
  EXPECT_LT(result["max_loss_difference"].get<double>(), 1e-4);
}

TEST(TrainScaling, TableThatCannotBeReadIsNamed) {
  const temporary_file text(rhyme());
  const temporary_file table("0.5 fast");
  const auto run = [&](const std::string& path) {
    return run_program(tiny(text, {"--device", "cpu", "--schedule", "table:" + path}));
  };
  EXPECT_EQ(run("/nowhere/table").exit_code, 1);
  EXPECT_THAT(run("/nowhere/table").err, HasSubstr("cannot read the table '/nowhere/table'"));
  EXPECT_THAT(run(table.path()).err, HasSubstr("'fast' is not a number (entry 2)"));
}

}  // namespace
}  // namespace stepgraph::test
