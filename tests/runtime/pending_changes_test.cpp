#include "../../graph_runtime/src/pending_changes.hpp"

#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <vector>

#include "common/expect_error.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::detail {
namespace {

using enum setting_field;

/// What a batch holds: at most one value of each field of each group.
std::map<std::pair<std::uint32_t, setting_field>, double> taken(pending_changes& pending) {
  std::vector<setting> batch;
  pending.take(batch, [](const changed_parts&) {});
  std::map<std::pair<std::uint32_t, setting_field>, double> values;
  for (const setting& entry : batch) {
    EXPECT_TRUE(values.emplace(std::pair(entry.group, entry.field), entry.value).second);
  }
  EXPECT_FALSE(pending.any());
  return values;
}

TEST(PendingChanges, LatestValueOfEachFieldOfEachGroupRemains) {
  pending_changes pending(2);
  for (const double value : {1.0, 2.0, 3.0}) {
    for (const std::uint32_t group : {0u, 1u, whole_step}) {
      for (std::uint32_t field = 0; field < setting_fields; ++field) {
        const auto known = static_cast<setting_field>(field);
        if (known == resume_learning_rate || known == resume_weight_decay) continue;
        pending.lock_open().set(group, known, value + group % 7);
      }
    }
  }
  EXPECT_TRUE(pending.any());
  const auto values = taken(pending);
  EXPECT_EQ(values.size(), 3 * (setting_fields - 2));
  for (const auto& [key, value] : values) EXPECT_EQ(value, 3.0 + key.first % 7);
}

struct by_hand {
  setting_field value;
  setting_field resume;
};

class PendingChangesByHand : public ::testing::TestWithParam<by_hand> {};

INSTANTIATE_TEST_SUITE_P(Fields, PendingChangesByHand,
                         ::testing::Values(by_hand{learning_rate, resume_learning_rate},
                                           by_hand{weight_decay, resume_weight_decay}));

TEST_P(PendingChangesByHand, ValueAndReturnToTheScheduleAreOneChoiceAndTheLaterWins) {
  const auto [value, resume] = GetParam();
  pending_changes pending(2);
  pending.lock_open().set(1, value, 5.0);
  pending.lock_open().set(1, resume, 0.0);
  auto values = taken(pending);
  EXPECT_EQ(values.size(), 1u);
  EXPECT_TRUE(values.contains({1, resume}));
  pending.lock_open().set(1, resume, 0.0);
  pending.lock_open().set(1, value, 6.0);
  values = taken(pending);
  EXPECT_EQ(values.size(), 1u);
  EXPECT_EQ((values[{1, value}]), 6.0);
  // One group's choice is not another's.
  pending.lock_open().set(0, value, 7.0);
  pending.lock_open().set(1, resume, 0.0);
  EXPECT_EQ(taken(pending).size(), 2u);
}

TEST(PendingChanges, ReturnsOfLearningRateAndWeightDecayAreApart) {
  pending_changes pending(1);
  pending.lock_open().set(0, learning_rate, 1.0);
  pending.lock_open().set(0, resume_weight_decay, 0.0);
  const auto values = taken(pending);
  EXPECT_TRUE(values.contains({0, learning_rate}));
  EXPECT_TRUE(values.contains({0, resume_weight_decay}));
}

TEST(PendingChanges, GivenBackValuesYieldToNewerOnes) {
  pending_changes pending(1);
  pending.lock_open().set(0, weight_decay, 1.0);
  pending.lock_open().set(0, eps, 2.0);
  std::vector<setting> batch;
  pending.take(batch, [](const changed_parts&) {});
  pending.lock_open().set(0, resume_weight_decay, 0.0);
  pending.give_back(batch);
  const auto values = taken(pending);
  EXPECT_EQ(values.size(), 2u);
  EXPECT_TRUE(values.contains({0, resume_weight_decay}));
  EXPECT_TRUE(values.contains({0, eps}));
}

TEST(PendingChanges, ClosedOnesRefuseEveryChange) {
  pending_changes pending(1);
  pending.lock().close();
  test::expect_error<usage_error>([&] { pending.lock_open().set(0, eps, 1.0); }, {"released"});
  test::expect_error<usage_error>([&] { pending.lock_open().add({.tensors = true}); },
                                  {"released"});
}

}  // namespace
}  // namespace stepgraph::detail
