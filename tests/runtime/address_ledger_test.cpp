#include "stepgraph/address_ledger.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <sstream>
#include <thread>

#include "common/expect_error.hpp"
#include "runtime/host_tensor.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/host_executor.hpp"

namespace stepgraph::test {
namespace {

using enum operand_kind;

std::string text_of(const void* address) {
  std::ostringstream text;
  text << address;
  return text.str();
}

class Ledger : public ::testing::Test {
 protected:
  step_plan plan() {
    step_builder builder;
    builder.add_group({.name = "group", .learning_rate = 0.1});
    builder.add_tensor(0, memory.operands("weight"));
    builder.add_tensor(0, second.operands("bias"));
    return builder.build();
  }
  void expect_refused(const std::vector<std::string>& words) {
    const std::vector<float> before = memory.parameter;
    expect_error<usage_error>([&] { executor.launch(); }, words);
    EXPECT_EQ(memory.parameter, before);
  }
  void expect_launches() {
    const float before = memory.parameter[0];
    executor.launch();
    EXPECT_NE(memory.parameter[0], before);
  }

  host_tensor memory{8};
  host_tensor second{8};
  host_tensor elsewhere{8};
  host_executor executor{plan()};
};

TEST_F(Ledger, HoldsEveryOperandOfThePlan) {
  const std::vector<ledger_entry> entries = executor.ledger().entries();
  ASSERT_EQ(entries.size(), 8u);
  EXPECT_EQ(entries[0].tensor, "weight");
  EXPECT_EQ(entries[1].operand, gradient);
  EXPECT_EQ(entries[1].address, memory.gradient.data());
  EXPECT_EQ(entries[1].bytes, 8 * sizeof(float));
  EXPECT_EQ(entries[1].generation, 1u);
  EXPECT_EQ(entries[4].tensor, "bias");
  EXPECT_EQ(executor.ledger().stale(), 0u);
  EXPECT_EQ(executor.recapture_required(), std::nullopt);
}

TEST_F(Ledger, MovedOperandIsRefusedUntilItIsRebound) {
  executor.ledger().moved(0, gradient, elsewhere.gradient.data());
  EXPECT_EQ(executor.ledger().stale(), 1u);
  // Re-binding alone makes it right.
  EXPECT_EQ(executor.recapture_required(), std::nullopt);
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_refused({"weight", "gradient", text_of(memory.gradient.data()),
                    text_of(elsewhere.gradient.data()), "rebind"});
  }
  executor.rebind(0, gradient, elsewhere.gradient.data());
  EXPECT_EQ(executor.ledger().stale(), 0u);
  EXPECT_EQ(executor.ledger().entry(0, gradient).generation, 2u);
  expect_launches();
}

TEST_F(Ledger, OperandThatMovesBackIsUpToDate) {
  executor.ledger().moved(0, gradient, elsewhere.gradient.data());
  executor.ledger().moved(0, gradient, memory.gradient.data());
  expect_launches();
}

TEST_F(Ledger, A23_FreedGradientIsRefusedAndTheFreshOneIsUsed) {
  executor.ledger().freed(0, gradient);
  expect_refused({"weight", "gradient", "freed", text_of(memory.gradient.data()), "rebind"});
  ASSERT_TRUE(executor.recapture_required().has_value());
  EXPECT_THAT(*executor.recapture_required(), ::testing::HasSubstr("freed"));
  std::fill(memory.gradient.begin(), memory.gradient.end(), -1000.0f);
  executor.rebind(0, gradient, elsewhere.gradient.data());
  EXPECT_EQ(executor.recapture_required(), std::nullopt);
  executor.launch();
  EXPECT_NEAR(memory.parameter[0], 0.9, 1e-6);
}

TEST_F(Ledger, FreedTensorNamesTheOthers) {
  executor.ledger().freed(1);
  EXPECT_EQ(executor.ledger().stale(), 4u);
  expect_refused({"bias", "parameter", "freed", "3 more"});
  executor.update(plan());
  expect_launches();
}

TEST_F(Ledger, ResizedOperandTakesAnUpdate) {
  executor.ledger().resized(0, exp_avg, 4);
  expect_refused({"weight", "exp_avg", "4 bytes", "32 bytes", "update"});
  ASSERT_TRUE(executor.recapture_required().has_value());
  expect_error<usage_error>([&] { executor.rebind(0, exp_avg, elsewhere.exp_avg.data()); },
                            {"weight", "exp_avg", "4 bytes", "32", "update"});
  executor.update(plan());
  EXPECT_EQ(executor.recapture_required(), std::nullopt);
  expect_launches();
}

TEST_F(Ledger, UpdateCountsGenerationsByName) {
  executor.rebind(0, gradient, elsewhere.gradient.data());
  step_builder builder;
  builder.add_group({.name = "group"});
  builder.add_tensor(0, second.operands("bias"));
  builder.add_tensor(0, memory.operands("weight"));
  executor.update(builder.build());
  EXPECT_EQ(executor.ledger().entry(1, gradient).generation, 3u);
  EXPECT_EQ(executor.ledger().entry(1, parameter).generation, 1u);
  EXPECT_EQ(executor.ledger().entry(0, gradient).tensor, "bias");
}

TEST_F(Ledger, RefusesWhatThePlanDoesNotHave) {
  const auto& ledger = executor.ledger();
  expect_error<usage_error>([&] { executor.ledger().freed(2); }, {"tensor 2", "2 tensors"});
  expect_error<usage_error>([&] { executor.ledger().moved(2, gradient, nullptr); }, {"tensor 2"});
  expect_error<usage_error>([&] { executor.ledger().freed(0, master); }, {"weight", "master"});
  expect_error<usage_error>([&] { static_cast<void>(ledger.entry(0, master)); }, {"master"});
  expect_launches();
}

TEST_F(Ledger, ReferenceSurvivesMovesOfTheExecutor) {
  address_ledger& ledger = executor.ledger();
  host_executor moved(std::move(executor));
  ledger.freed(0, gradient);
  expect_error<usage_error>([&] { moved.launch(); }, {"freed"});
}

TEST_F(Ledger, EmptyOperandsAreNeverStale) {
  host_tensor empty(0);
  step_builder builder;
  builder.add_group({});
  builder.add_tensor(0, empty.operands("empty"));
  host_executor idle(builder.build());
  idle.ledger().freed(0);
  idle.launch();
  EXPECT_EQ(idle.status().step, 1u);
}

TEST_F(Ledger, KnownMemoryIsStillCheckedForWhatNeedsNoDriver) {
  binding known = {0, gradient, nullptr, nullptr, true};
  expect_error<usage_error>([&] { executor.rebind(std::span(&known, 1)); }, {"weight", "null"});
  known.data = reinterpret_cast<std::byte*>(elsewhere.gradient.data()) + 1;
  expect_error<usage_error>([&] { executor.rebind(std::span(&known, 1)); },
                            {"weight", "multiple of 4 bytes"});
  known.data = elsewhere.gradient.data();
  executor.rebind(std::span(&known, 1));
  EXPECT_EQ(executor.ledger().entry(0, gradient).address, elsewhere.gradient.data());
  expect_launches();
}

TEST_F(Ledger, SeveralBindingsAreAllTakenOrNone) {
  const binding good[] = {{0, gradient, elsewhere.gradient.data()},
                          {1, gradient, memory.gradient.data()}};
  const binding bad[] = {good[0], {1, master, memory.master.data()}};
  expect_error<usage_error>([&] { executor.rebind(bad); }, {"bias", "master"});
  EXPECT_EQ(executor.ledger().entry(0, gradient).address, memory.gradient.data());
  executor.rebind(good);
  EXPECT_EQ(executor.ledger().entry(0, gradient).address, elsewhere.gradient.data());
  EXPECT_EQ(executor.ledger().entry(1, gradient).address, memory.gradient.data());
  expect_launches();
}

TEST_F(Ledger, ToldFromAnotherThreadWhileSteppingAndRebinding) {
  std::thread teller([&] {
    for (int round = 0; round < 2000; ++round) {
      executor.ledger().moved(1, gradient, elsewhere.gradient.data());
      executor.ledger().moved(1, gradient, second.gradient.data());
    }
  });
  for (int round = 0; round < 200; ++round) {
    try {
      executor.launch();
    } catch (const usage_error&) {
    }
    executor.rebind(0, gradient,
                    round % 2 == 0 ? elsewhere.gradient.data() : memory.gradient.data());
  }
  teller.join();
  EXPECT_EQ(executor.ledger().stale(), 0u);
  expect_launches();
}

}  // namespace
}  // namespace stepgraph::test
