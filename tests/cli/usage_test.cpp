#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/run_program.hpp"

namespace stepgraph::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

struct wrong_usage {
  const char* name;
  std::vector<std::string> arguments;
  const char* message;
};

class WrongUsage : public ::testing::TestWithParam<wrong_usage> {};

TEST_P(WrongUsage, ExitsWithTwoAndSaysWhy) {
  const program_result result = run_program(GetParam().arguments);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.out, IsEmpty());
  EXPECT_THAT(result.err, AllOf(StartsWith("stepgraph: error: "), HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(
    Program, WrongUsage,
    ::testing::Values(
        wrong_usage{"NoCommand", {}, "subcommand"},
        wrong_usage{"UnknownCommand", {"fly"}, "subcommand"},
        wrong_usage{"UnknownOption", {"inspect", "--colour"}, "--colour"},
        wrong_usage{"TwoCommands", {"inspect", "doctor"}, "doctor"},
        wrong_usage{"UnknownList", {"inspect", "--parameters", "gpt5"}, "gpt5"},
        wrong_usage{"UnknownFormat", {"inspect", "--parameter-format", "f8"}, "f8"},
        wrong_usage{"UnknownMaster", {"inspect", "--master", "f16"}, "f16"},
        wrong_usage{"NoTensors", {"inspect", "--tensors", "0"}, "--tensors"},
        wrong_usage{
            "ZeroBandwidth", {"inspect", "--bandwidth", "0"}, "'0' is not a positive number"},
        wrong_usage{"NanClip", {"inspect", "--clip", "nan"}, "'nan' is not a number"},
        wrong_usage{
            "TwoThingsOnStandardOutput", {"inspect", "--json", "-", "--dot", "-"}, "--json"},
        wrong_usage{"MissingValue", {"inspect", "--json"}, "--json"},
        wrong_usage{"NegativeSteps", {"train", "--steps", "-3"}, "-3"},
        wrong_usage{"NoSteps", {"train", "--steps", "0"}, "--steps"},
        wrong_usage{"WordForSteps", {"train", "--steps", "many"}, "many"},
        wrong_usage{"HugeSteps", {"train", "--steps", "99999999999999999999"}, "--steps"},
        wrong_usage{"NegativeSeed", {"train", "--seed", "-1"}, "-1"},
        wrong_usage{"NegativeRate", {"train", "--lr", "-1"}, "'-1' is not a positive number"},
        wrong_usage{"InfiniteRate", {"train", "--lr", "inf"}, "'inf' is not a positive number"},
        wrong_usage{"BetaOfOne", {"train", "--beta1", "1"}, "'1' is not a number"},
        wrong_usage{"UnknownSchedule", {"train", "--schedule", "square"}, "square"},
        wrong_usage{"UnknownDevice", {"train", "--device", "tpu"}, "tpu"},
        wrong_usage{"LongWarmup", {"train", "--steps", "5", "--warmup", "5"}, "--warmup"},
        wrong_usage{"LargeMinimum", {"train", "--lr", "0.1", "--min-lr", "1"}, "--min-lr"},
        wrong_usage{"UnknownType", {"train", "--dtype", "f64"}, "f64"},
        wrong_usage{"UnknownScaling", {"train", "--loss-scaling", "apex"}, "apex"},
        wrong_usage{"ZeroScale", {"train", "--loss-scale", "0"}, "'0' is not a positive number"},
        wrong_usage{"IntervalWithoutRule",
                    {"train", "--growth-interval", "5"},
                    "--growth-interval: is not used by --loss-scaling none"},
        wrong_usage{"NumberOfAnotherSchedule",
                    {"train", "--schedule", "cosine", "--gamma", "0.5"},
                    "--gamma: is not used by --schedule cosine"},
        wrong_usage{"WarmupOfOneCycle",
                    {"train", "--schedule", "one-cycle", "--warmup", "3"},
                    "--warmup: is not used by --schedule one-cycle"},
        wrong_usage{"MissingMilestones", {"train", "--schedule", "multistep"}, "--milestones"},
        wrong_usage{"FallingMilestones",
                    {"train", "--schedule", "multistep", "--milestones", "9,3"},
                    "--schedule: "},
        wrong_usage{"TableWithoutFile", {"train", "--schedule", "table:"}, "table:"},
        wrong_usage{"MissingWeightDecayEnd",
                    {"train", "--weight-decay-schedule", "linear"},
                    "--weight-decay-end"},
        wrong_usage{"EndOfAConstantWeightDecay",
                    {"train", "--weight-decay-end", "0.3"},
                    "--weight-decay-end: is not used by --weight-decay-schedule constant"},
        wrong_usage{"SaveEveryWithoutSave", {"train", "--save-every", "5"}, "needs --save FILE"},
        wrong_usage{"ResumeBesideTheReference",
                    {"train", "--resume", "some", "--compare"},
                    "excludes --compare"},
        wrong_usage{"ZeroedAndUnscaled",
                    {"inspect", "--zero-gradients", "--unscale-gradients"},
                    "zero_gradients and unscale_gradients"},
        wrong_usage{
            "ForeignWorkNowhere", {"inspect", "--foreign", "log"}, "'log' is not NAME=before:NODE"},
        wrong_usage{
            "ForeignWorkAtAnUnknownNode", {"inspect", "--foreign", "log=after:lunch"}, "lunch"},
        wrong_usage{"NoRepetitions", {"bench", "--repetitions", "0"}, "--repetitions"},
        wrong_usage{"HeadsThatDoNotDivide",
                    {"train", "--width", "30", "--heads", "4"},
                    "30 is not a multiple of --heads 4"}),
    [](const auto& instance) { return std::string(instance.param.name); });

TEST(Usage, EveryCommandExplainsItself) {
  for (const char* name : {"train", "inspect", "bench", "doctor"}) {
    const program_result result = run_program({name, "--help"});
    EXPECT_EQ(result.exit_code, 0) << name;
    EXPECT_THAT(result.out, HasSubstr("--json")) << name;
    EXPECT_THAT(result.err, IsEmpty()) << name;
  }
}

TEST(Usage, HelpListsTheCommands) {
  const program_result result = run_program({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("train"), HasSubstr("inspect"), HasSubstr("bench"),
                                HasSubstr("doctor")));
}

TEST(Usage, SaysItsVersion) {
  const program_result result = run_program({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, StartsWith("stepgraph 0."));
}

TEST(Usage, UnwritableFileIsAnError) {
  for (const char* command : {"inspect", "bench", "doctor"}) {
    const program_result result = run_program({command, "--json", "/nowhere/result.json"});
    EXPECT_EQ(result.exit_code, 1) << command;
    EXPECT_THAT(result.err, HasSubstr("stepgraph: error: cannot write '/nowhere/result.json'"));
  }
}

}  // namespace
}  // namespace stepgraph::test
