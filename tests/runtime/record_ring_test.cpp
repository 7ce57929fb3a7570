#include "../../graph_runtime/src/record_ring.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/host_tensor.hpp"
#include "stepgraph/host_executor.hpp"

// Step records of the host executor: each is complete or not there, and they come in order.
namespace stepgraph::test {
namespace {

/// A step over one tensor and `groups` groups whose numbers follow from the number of the launch.
class recorded_step {
 public:
  explicit recorded_step(std::uint32_t capacity, std::size_t groups = 3)
      : executor_(plan_of(memory_, capacity, groups)) {}

  host_executor& executor() { return executor_; }

  /// Makes launch number `launch`: everything that it records is a multiple of it.
  void launch(std::uint64_t launch) {
    const auto value = static_cast<double>(launch);
    for (group_id group = 0; group < executor_.plan().groups.size(); ++group) {
      executor_.set_learning_rate(group, value * (group + 1));
      executor_.set_weight_decay(group, value * (group + 2));
    }
    executor_.set_loss_scale(value);
    executor_.launch();
  }

 private:
  static step_plan plan_of(host_tensor& memory, std::uint32_t capacity, std::size_t groups) {
    step_builder builder;
    builder.set_options({.samples_per_step = 16, .record_capacity = capacity});
    for (std::size_t group = 0; group < groups; ++group) builder.add_group({});
    builder.add_tensor(0, memory.operands("weight"));
    return builder.build();
  }

  host_tensor memory_;
  host_executor executor_;
};

void expect_record_of(const step_record& record, std::uint64_t launch) {
  const auto value = static_cast<double>(launch);
  ASSERT_EQ(record.launch, launch);
  ASSERT_EQ(record.step, launch);
  ASSERT_EQ(record.skipped, 0u);
  ASSERT_EQ(record.samples, 16 * launch);
  ASSERT_EQ(record.loss_scale, static_cast<double>(static_cast<float>(launch)));
  for (std::size_t group = 0; group < record.groups.size(); ++group) {
    ASSERT_EQ(record.groups[group].step, launch);
    ASSERT_EQ(record.groups[group].learning_rate, value * static_cast<double>(group + 1));
    ASSERT_EQ(record.groups[group].weight_decay, value * static_cast<double>(group + 2));
  }
}

TEST(StepRecords, PlanWithoutThemHasNone) {
  recorded_step step(0);
  step.launch(1);
  EXPECT_TRUE(step.executor().read_records().records.empty());
  EXPECT_EQ(step.executor().read_records().overwritten, 0u);
}

TEST(StepRecords, EachIsTakenOnceInTheOrderOfLaunches) {
  recorded_step step(4);
  EXPECT_TRUE(step.executor().read_records().records.empty());
  std::uint64_t launch = 0;
  for (const int launches : {1, 2, 4, 3, 1, 4}) {
    for (int i = 0; i < launches; ++i) step.launch(launch + static_cast<std::uint64_t>(i) + 1);
    const record_batch batch = step.executor().read_records();
    EXPECT_EQ(batch.overwritten, 0u);
    ASSERT_EQ(batch.records.size(), static_cast<std::size_t>(launches));
    for (const step_record& record : batch.records) expect_record_of(record, ++launch);
    EXPECT_TRUE(step.executor().read_records().records.empty());
  }
}

TEST(StepRecords, OverwrittenOnesAreCountedAndTheNewestRemain) {
  for (const std::uint32_t capacity : {1u, 2u, 5u}) {
    recorded_step step(capacity);
    for (std::uint64_t launch = 1; launch <= 12; ++launch) step.launch(launch);
    record_batch batch = step.executor().read_records();
    EXPECT_EQ(batch.overwritten, 12 - capacity);
    ASSERT_EQ(batch.records.size(), capacity);
    std::uint64_t launch = batch.overwritten;
    for (const step_record& record : batch.records) expect_record_of(record, ++launch);
    step.launch(13);
    batch = step.executor().read_records();
    EXPECT_EQ(batch.overwritten, 0u) << "counted once";
    ASSERT_EQ(batch.records.size(), 1u);
    expect_record_of(batch.records[0], 13);
  }
}

TEST(StepRecords, AfterManyLaunchesTheRingStillHoldsTheLast) {
  recorded_step step(64);
  for (std::uint64_t launch = 1; launch <= 20'000; ++launch) step.launch(launch);
  const record_batch batch = step.executor().read_records();
  EXPECT_EQ(batch.overwritten, 20'000u - 64u);
  ASSERT_EQ(batch.records.size(), 64u);
  expect_record_of(batch.records.back(), 20'000);
}

TEST(StepRecords, StepWithoutGroupsIsRecorded) {
  step_builder builder;
  builder.set_options({.record_capacity = 2});
  host_executor executor(builder.build());
  executor.launch();
  const record_batch batch = executor.read_records();
  ASSERT_EQ(batch.records.size(), 1u);
  EXPECT_TRUE(batch.records[0].groups.empty());
}

TEST(StepRecords, MovedExecutorKeepsItsRing) {
  recorded_step step(4);
  step.launch(1);
  host_executor moved(std::move(step.executor()));
  const record_batch batch = moved.read_records();
  ASSERT_EQ(batch.records.size(), 1u);
  expect_record_of(batch.records[0], 1);
  moved.launch();
  EXPECT_EQ(moved.read_records().records.size(), 1u);
}

/// A ring whose words a test writes itself, after `launches` launches.
class ring_by_hand {
 public:
  explicit ring_by_hand(std::uint64_t launches)
      : plan_(make_plan()),
        words_(words()),
        ring_(plan_, std::shared_ptr<void>(words_.data(), [](void*) {}), launches) {}

  detail::record_ring& ring() { return ring_; }
  std::uint32_t record_words() const { return words_of_record(groups); }

  /// Word `i` of the record of launch number `launch`.
  void write(std::uint64_t launch, std::uint32_t i) {
    step_scalars scalars;
    scalars.launches = launch;
    std::vector<std::uint32_t> values(record_words());
    std::memcpy(values.data(), &scalars, sizeof scalars);
    record_of(ring_.view(), groups, launch)[i] = tagged_word(tag_of_launch(launch), values[i]);
  }
  void write_all_but(std::uint64_t launch, std::uint32_t missing) {
    for (std::uint32_t i = 0; i < record_words(); ++i) {
      if (i != missing) write(launch, i);
    }
  }

 private:
  static constexpr std::uint32_t groups = 2;

  static step_plan make_plan() {
    step_builder builder;
    builder.set_options({.record_capacity = 3});
    for (std::uint32_t group = 0; group < groups; ++group) builder.add_group({});
    return builder.build();
  }
  std::vector<std::uint64_t> words() const {
    return std::vector<std::uint64_t>(detail::record_ring::bytes_for(plan_) /
                                      sizeof(std::uint64_t));
  }

  step_plan plan_;
  std::vector<std::uint64_t> words_;
  detail::record_ring ring_;
};

// Also where the tag of a launch is that of fresh memory, 0.
TEST(RecordRing, RecordIsThereOnceEachOfItsWordsIs) {
  for (const std::uint64_t launches : {0ull, 7ull, 0xffffffffull}) {
    const std::uint64_t launch = launches + 1;
    const std::uint32_t count = ring_by_hand(launches).record_words();
    for (std::uint32_t last = 0; last < count; ++last) {
      ring_by_hand hand(launches);
      EXPECT_TRUE(hand.ring().read().records.empty());
      hand.write_all_but(launch, last);
      EXPECT_TRUE(hand.ring().read().records.empty()) << "without word " << last;
      hand.write(launch, last);
      const record_batch batch = hand.ring().read();
      ASSERT_EQ(batch.records.size(), 1u);
      EXPECT_EQ(batch.records[0].launch, launch);
      EXPECT_EQ(batch.records[0].groups.size(), 2u);
      EXPECT_EQ(batch.overwritten, 0u);
    }
  }
}

// Nobody has read for so long that the tags have come round.
TEST(RecordRing, ReaderMayLagByAnyNumberOfLaunches) {
  for (const std::uint64_t lag :
       {0x7ffffff0ull, 0x80000010ull, 0xfffffff0ull, 0x100000002ull, 0x700000001ull}) {
    ring_by_hand hand(0);
    for (const std::uint64_t launch : {lag, lag + 1, lag + 2}) {
      hand.write_all_but(launch, hand.record_words());
    }
    const record_batch batch = hand.ring().read();
    EXPECT_EQ(batch.overwritten, lag - 1);
    ASSERT_EQ(batch.records.size(), 3u) << lag;
    EXPECT_EQ(batch.records[0].launch, lag);
    // Beside one that is being written.
    hand.write(lag + 3, 5);
    EXPECT_TRUE(hand.ring().read().records.empty());
    hand.write_all_but(lag + 3, 5);
    EXPECT_EQ(hand.ring().read().records.size(), 1u);
  }
}

TEST(RecordRing, RecordThatIsBeingOverwrittenIsLostAndNoOther) {
  for (std::uint32_t first = 0; first < ring_by_hand(0).record_words(); ++first) {
    ring_by_hand hand(0);
    for (const std::uint64_t launch : {1, 2, 3}) hand.write_all_but(launch, hand.record_words());
    hand.write(4, first);
    const record_batch batch = hand.ring().read();
    EXPECT_EQ(batch.overwritten, 1u);
    ASSERT_EQ(batch.records.size(), 2u);
    EXPECT_EQ(batch.records[0].launch, 2u);
    EXPECT_EQ(batch.records[1].launch, 3u);
    hand.write_all_but(4, first);
    EXPECT_EQ(hand.ring().read().records.size(), 1u);
  }
}

// The writer never waits for the reader: with few places it laps the reader again and again.
TEST(StepRecords, A33_ReaderBesideAWriterSeesWholeRecordsInOrder) {
  for (const std::uint32_t capacity : {1u, 2u, 3u, 64u, 20'000u}) {
    SCOPED_TRACE("capacity " + std::to_string(capacity));
    recorded_step step(capacity, 5);
    constexpr std::uint64_t launches = 20'000;
    std::atomic<bool> done = false;
    std::thread writer([&] {
      for (std::uint64_t launch = 1; launch <= launches; ++launch) step.launch(launch);
      done.store(true, std::memory_order_release);
    });
    std::uint64_t accounted = 0;
    for (bool last = false; !last;) {
      last = done.load(std::memory_order_acquire);
      const record_batch batch = step.executor().read_records();
      // All that were lost in this batch may lie between its records.
      std::uint64_t lost = 0;
      for (const step_record& record : batch.records) {
        EXPECT_GT(record.launch, accounted + lost);
        lost = record.launch - 1 - accounted - (&record - batch.records.data());
        if (!HasFailure()) expect_record_of(record, record.launch);
      }
      EXPECT_LE(lost, batch.overwritten);
      // None is taken for lost because it was written while the ring was read.
      if (capacity >= launches) {
        EXPECT_EQ(batch.overwritten, 0u);
      }
      accounted += batch.records.size() + batch.overwritten;
    }
    writer.join();
    EXPECT_EQ(accounted, launches) << "every launch was read or counted as lost";
  }
}

}  // namespace
}  // namespace stepgraph::test
