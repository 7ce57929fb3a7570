#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <thread>
#include <vector>

#include "common/warmed_up.hpp"
#include "conformance/conformance.hpp"

// Step records: what they say is what the status says, they come in order and whole, and reading
// them waits for nothing.
namespace stepgraph::test {
namespace {

class Records : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Records, one_executor);

void expect_record_of_status(const step_record& record, const step_status& status) {
  EXPECT_EQ(record.launch, status.step + status.skipped);
  EXPECT_EQ(record.step, status.step);
  EXPECT_EQ(record.skipped, status.skipped);
  EXPECT_EQ(record.samples, status.samples);
  EXPECT_EQ(record.was_skipped, status.last_skipped);
  EXPECT_EQ(record.found_inf, status.found_inf);
  EXPECT_EQ(record.grad_norm, status.grad_norm);
  EXPECT_EQ(record.clip_coefficient, status.clip_coefficient);
  EXPECT_EQ(record.loss_scale, status.loss_scale);
  EXPECT_EQ(record.zeros, status.zeros);
  ASSERT_EQ(record.groups.size(), status.groups.size());
  for (std::size_t g = 0; g < status.groups.size(); ++g) {
    EXPECT_EQ(record.groups[g].step, status.groups[g].step);
    EXPECT_EQ(record.groups[g].learning_rate, status.groups[g].learning_rate);
    EXPECT_EQ(record.groups[g].weight_decay, status.groups[g].weight_decay);
  }
}

/// A step of which everything that is recorded moves.
test_problem recorded_problem(std::uint32_t capacity) {
  test_problem problem;
  problem.options.max_grad_norm = 1.0;
  problem.options.count_zeros = true;
  problem.options.scaling.rule = loss_scale_rule::torch_amp;
  problem.options.scaling.growth_interval = 2;
  problem.options.samples_per_step = 7;
  problem.options.record_capacity = capacity;
  problem.groups = {
      {.name = "scheduled",
       .learning_rate_schedule = warmed_up(learning_rate_style::linear, 0.0, 1e-2, 0.0, 0, 100)},
      {.name = "plain", .weight_decay = 0.1}};
  problem.add({"scheduled", 0, 3000, {}});
  problem.add({"plain", 1, 10, {}});
  return problem;
}

TEST_P(Records, SayWhatTheStatusSaysAfterEveryStep) {
  const auto adapter = make(recorded_problem(4));
  for (int step = 0; step < 12; ++step) {
    std::vector<float> gradient(10, static_cast<float>(step % 3));
    if (step % 5 == 2) gradient[9] = std::numeric_limits<float>::quiet_NaN();
    adapter->write_gradient(1, gradient);
    adapter->get().set_weight_decay(1, 0.01 * step);
    adapter->launch();
    const step_status status = adapter->get().status();
    const record_batch batch = adapter->get().read_records();
    ASSERT_EQ(batch.records.size(), 1u);
    EXPECT_EQ(batch.overwritten, 0u);
    expect_record_of_status(batch.records[0], status);
  }
}

TEST_P(Records, HaveTheBitsOfTheHost) {
  for (const bool exchange : {false, true}) {
    test_problem problem = recorded_problem(16);
    problem.options.exchange_totals = exchange;
    expect_bits_of_host(GetParam(), problem, 10);
  }
}

TEST_P(Records, OfManyGroupsAreWhole) {
  test_problem problem;
  problem.options.record_capacity = 3;
  problem.groups.clear();
  for (group_id g = 0; g < 465; ++g) {
    problem.groups.push_back({.name = std::to_string(g), .learning_rate = 1e-5 * (g + 1)});
  }
  problem.add({"tensor", 464, 100, {}});
  expect_bits_of_host(GetParam(), problem, 3);
}

TEST_P(Records, A33_TakenBesideLaunchesTheyAreWholeAndInOrder) {
  constexpr std::uint32_t capacity = 8;
  constexpr std::uint64_t launches = 2000;
  const auto adapter = make(recorded_problem(capacity));
  std::uint64_t next = 1;
  std::uint64_t accounted = 0;
  const auto take = [&] {
    const record_batch batch = adapter->get().read_records();
    EXPECT_LE(batch.records.size(), launches);
    for (const step_record& record : batch.records) {
      EXPECT_GE(record.launch, next);
      next = record.launch + 1;
      // Numbers of one record belong to one launch.
      EXPECT_EQ(record.step + record.skipped, record.launch);
      EXPECT_EQ(record.samples, 7 * record.step);
      ASSERT_EQ(record.groups.size(), 2u);
      EXPECT_EQ(record.groups[0].step, record.step);
      EXPECT_EQ(record.groups[1].step, record.step);
      EXPECT_EQ(record.groups[1].weight_decay, static_cast<double>(record.launch));
    }
    accounted += batch.records.size() + batch.overwritten;
  };
  for (std::uint64_t launch = 1; launch <= launches; ++launch) {
    adapter->get().set_weight_decay(1, static_cast<double>(launch));
    adapter->launch();
    if (launch % 3 == 0) take();
  }
  adapter->get().status();  // waits for the launches
  take();
  EXPECT_EQ(accounted, launches);
  EXPECT_EQ(next, launches + 1);
}

TEST_P(Records, OverwrittenOnesAreCounted) {
  const auto adapter = make(recorded_problem(5));
  adapter->launch(37);
  adapter->get().status();
  const record_batch batch = adapter->get().read_records();
  EXPECT_EQ(batch.overwritten, 32u);
  ASSERT_EQ(batch.records.size(), 5u);
  for (std::uint64_t i = 0; i < 5; ++i) EXPECT_EQ(batch.records[i].launch, 33 + i);
}

// Whoever waits for a record alone sees it come, without any call that waits for the device.
TEST_P(Records, AppearWithoutWaitingForTheDevice) {
  const auto adapter = make(recorded_problem(4));
  adapter->launch();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  record_batch batch;
  while (batch.records.empty() && std::chrono::steady_clock::now() < end) {
    batch = adapter->get().read_records();
  }
  ASSERT_EQ(batch.records.size(), 1u);
  EXPECT_EQ(batch.records[0].launch, 1u);
}

TEST_P(Records, ReaderOnAnotherThreadSeesWholeRecordsInOrder) {
  constexpr std::uint64_t launches = 3000;
  const auto adapter = make(recorded_problem(2));
  std::uint64_t accounted = 0;
  std::thread reader([&] {
    std::uint64_t next = 1;
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(10);
    while (accounted < launches && std::chrono::steady_clock::now() < end) {
      const record_batch batch = adapter->get().read_records();
      for (const step_record& record : batch.records) {
        EXPECT_GE(record.launch, next);
        next = record.launch + 1;
        EXPECT_EQ(record.step + record.skipped, record.launch);
        EXPECT_EQ(record.groups[0].step, record.step);
        EXPECT_EQ(record.groups[1].weight_decay, static_cast<double>(record.launch));
      }
      accounted += batch.records.size() + batch.overwritten;
    }
  });
  for (std::uint64_t launch = 1; launch <= launches; ++launch) {
    adapter->get().set_weight_decay(1, static_cast<double>(launch));
    adapter->launch();
  }
  reader.join();
  EXPECT_EQ(accounted, launches);
}

}  // namespace
}  // namespace stepgraph::test
