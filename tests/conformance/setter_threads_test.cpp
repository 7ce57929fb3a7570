#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "conformance/conformance.hpp"

// Setters called by other threads while one thread launches: every step sees values that were set,
// together where they were set together, and the last ones are in force at the end.
namespace stepgraph::test {
namespace {

class SetterThreads : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(SetterThreads, one_executor);

constexpr std::uint32_t capacity = 4096;

test_problem recorded_problem(group_id groups) {
  test_problem problem;
  problem.options.measure_norm = true;
  problem.options.record_capacity = capacity;
  problem.groups.clear();
  for (group_id g = 0; g < groups; ++g) {
    problem.groups.push_back({.name = std::to_string(g), .learning_rate = 0.0});
  }
  problem.add({"tensor", 0, 100, {}});
  return problem;
}

TEST_P(SetterThreads, ValuesAreNeverTornNorGoBackwards) {
  constexpr group_id groups = 4;
  constexpr int rounds = 3000;
  const auto adapter = make(recorded_problem(groups));
  executor& run = adapter->get();
  std::atomic<int> running = groups;
  // Each thread counts up in a group of its own; bits of two values mixed would be no whole number.
  std::vector<std::thread> setters;
  for (group_id g = 0; g < groups; ++g) {
    setters.emplace_back([&run, &running, g] {
      for (int i = 1; i <= rounds; ++i) {
        run.set_learning_rate(g, i);
        run.set_weight_decay(g, i);
        if (g == 0) run.set_loss_scale(i);
      }
      --running;
    });
  }
  int launches = 0;
  while (running > 0 && launches < 2000) {
    adapter->launch();
    ++launches;
  }
  for (std::thread& setter : setters) setter.join();
  adapter->launch();
  ++launches;
  const step_status status = run.status();
  EXPECT_EQ(status.loss_scale, rounds);
  for (const group_status& group : status.groups) {
    EXPECT_EQ(group.learning_rate, rounds);
    EXPECT_EQ(group.weight_decay, rounds);
  }

  const record_batch batch = run.read_records();
  ASSERT_EQ(batch.records.size(), static_cast<std::size_t>(launches));
  std::vector<double> latest(groups, 0.0);
  for (const step_record& record : batch.records) {
    for (group_id g = 0; g < groups; ++g) {
      const double learning_rate = record.groups[g].learning_rate;
      const double weight_decay = record.groups[g].weight_decay;
      ASSERT_EQ(learning_rate, static_cast<int>(learning_rate));
      ASSERT_GE(learning_rate, latest[g]);
      ASSERT_LE(learning_rate, rounds);
      // The weight decay is set next: a launch in between sees it one behind.
      ASSERT_TRUE(weight_decay == learning_rate || weight_decay == learning_rate - 1)
          << weight_decay << " beside " << learning_rate;
      latest[g] = learning_rate;
    }
  }
}

TEST_P(SetterThreads, ManyFieldsAtOnceArriveWhole) {
  // More settings than travel in a launch's own arguments.
  constexpr group_id groups = 32;
  const auto adapter = make(recorded_problem(groups));
  executor& run = adapter->get();
  std::atomic<bool> done = false;
  std::thread setter([&] {
    for (int i = 1; i <= 200; ++i) {
      for (group_id g = 0; g < groups; ++g) run.set_learning_rate(g, i);
    }
    done = true;
  });
  int launches = 0;
  while (!done && launches < 2000) {
    adapter->launch();
    ++launches;
  }
  setter.join();
  adapter->launch();
  run.status();
  const record_batch batch = run.read_records();
  for (const step_record& record : batch.records) {
    // The groups are set one after the other: those already set are one ahead.
    for (group_id g = 1; g < groups; ++g) {
      const double ahead = record.groups[g - 1].learning_rate - record.groups[g].learning_rate;
      ASSERT_TRUE(ahead == 0.0 || ahead == 1.0) << ahead << " at group " << g;
    }
  }
  for (const group_record& group : batch.records.back().groups) {
    EXPECT_EQ(group.learning_rate, 200.0);
  }
}

TEST_P(SetterThreads, StateLoadedByAnotherThreadCountsOnFromTheNextLaunch) {
  const auto adapter = make(recorded_problem(3));
  adapter->launch(5);
  step_status state = adapter->get().status();
  state.step = 1000;
  for (group_status& group : state.groups) group.step = 2000;
  std::thread([&] { adapter->get().load_state(state); }).join();
  adapter->launch(3);
  EXPECT_EQ(adapter->get().status().step, 1003u);
  for (const group_status& group : adapter->get().status().groups) EXPECT_EQ(group.step, 2003u);
}

}  // namespace
}  // namespace stepgraph::test
