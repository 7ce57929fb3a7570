#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "common/random_numbers.hpp"
#include "conformance/conformance.hpp"
#include "stepgraph/error.hpp"

// What an update leaves behind is what a fresh executor of the new plan in the same state would be.
namespace stepgraph::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr update_signature plain = {};
constexpr update_signature with_master = {storage_format::bf16, storage_format::f32,
                                          storage_format::f32, storage_format::f32,
                                          storage_format::f32};
constexpr update_signature narrow = {storage_format::bf16, storage_format::bf16,
                                     storage_format::none, storage_format::bf16,
                                     storage_format::bf16};

test_problem two_groups() {
  test_problem problem;
  problem.groups = {{.name = "a", .learning_rate = 0.01},
                    {.name = "b",
                     .weight_decay = 0.1,
                     .learning_rate_schedule = schedules::table({0.02, 0.04, 0.01, 0.03})}};
  problem.options = {.max_grad_norm = 1.0};
  problem.add({"x", 0, 5000, plain});
  problem.add({"y", 1, 300, plain});
  problem.add({"z", 0, 700, with_master});
  return problem;
}

class Updates : public Conformance {
 protected:
  /// A fresh executor of the adapter's problem, in the state in which the adapter is.
  std::unique_ptr<executor_adapter> twin_of(executor_adapter& adapter) const {
    test_problem problem = adapter.problem();
    problem.contents = adapter.read_all();
    auto twin = make(problem);
    twin->get().load_state(adapter.get().status());
    return twin;
  }
  static void expect_same_steps(executor_adapter& found, executor_adapter& expected,
                                int steps = 3) {
    found.run_with_fresh_gradients(steps, 100);
    expected.run_with_fresh_gradients(steps, 100);
    expect_same_bits(found.problem(), found.read_all(), expected.read_all());
    const step_status a = found.get().status();
    const step_status b = expected.get().status();
    EXPECT_EQ(a.step, b.step);
    EXPECT_EQ(a.skipped, b.skipped);
    EXPECT_EQ(a.samples, b.samples);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
    EXPECT_EQ(a.clip_coefficient, b.clip_coefficient);
    EXPECT_EQ(a.next_loss_scale.scale, b.next_loss_scale.scale);
    ASSERT_EQ(a.groups.size(), b.groups.size());
    for (std::size_t group = 0; group < a.groups.size(); ++group) {
      EXPECT_EQ(a.groups[group].step, b.groups[group].step);
      EXPECT_EQ(a.groups[group].learning_rate, b.groups[group].learning_rate);
    }
    found.expect_guards_intact();
  }
};

TEST_P(Updates, HyperparametersOfTheNewPlan) {
  const auto adapter = make(two_groups());
  adapter->run_with_fresh_gradients(2);
  test_problem next = two_groups();
  next.groups[0].learning_rate = 0.03;
  next.groups[1].mode = weight_decay_mode::l2;
  next.groups[1].bias_correction = false;
  next.groups[1].learning_rate_schedule = schedules::table({0.1, 0.09, 0.08, 0.03});
  next.options.max_grad_norm = 0.5;
  const update_report report = adapter->update(next);
  EXPECT_EQ(report.path, update_path::scalar_write);
  EXPECT_FALSE(report.rebuilt);
  EXPECT_THAT(report.reasons, Contains(HasSubstr("group 'a': learning_rate")));
  const auto twin = twin_of(*adapter);
  expect_same_steps(*adapter, *twin);
}

TEST_P(Updates, HandSetValuesOfUnchangedGroupsStay) {
  const auto adapter = make(two_groups());
  adapter->get().set_learning_rate(0, 0.05);
  adapter->run_with_fresh_gradients(2);
  adapter->get().set_eps(1, 1e-3);
  test_problem next = two_groups();
  next.groups.push_back({.name = "c", .learning_rate = 0.03});
  next.add({"w", 2, 2100, plain});
  adapter->update(next);
  const auto twin = twin_of(*adapter);
  twin->get().set_learning_rate(0, 0.05);
  twin->get().set_eps(1, 1e-3);
  expect_same_steps(*adapter, *twin);
}

TEST_P(Updates, TensorsAndGroupsComeAndGo) {
  const auto adapter = make(two_groups());
  adapter->run_with_fresh_gradients(3);
  test_problem next;
  next.groups = {{.name = "fresh", .learning_rate = 0.5}, two_groups().groups[1]};
  next.options = two_groups().options;
  next.add({"new", 0, 4100, narrow});
  next.add({"y", 1, 300, plain});
  next.add({"newer", 1, 10, with_master});
  const update_report report = adapter->update(next);
  EXPECT_THAT(report.reasons, Contains(HasSubstr("group 'a' was dropped")));
  EXPECT_THAT(report.reasons, Contains(HasSubstr("tensor 'new' was added to group 'fresh'")));
  EXPECT_THAT(report.reasons, Contains(HasSubstr("node 'update/bf16/bf16")));
  EXPECT_EQ(adapter->get().status().groups[0].step, 0u);
  EXPECT_EQ(adapter->get().status().groups[1].step, 3u);
  const auto twin = twin_of(*adapter);
  expect_same_steps(*adapter, *twin);
}

TEST_P(Updates, OptionsThatChangeTheNodes) {
  const auto adapter = make(two_groups());
  adapter->run_with_fresh_gradients(2);
  test_problem next = two_groups();
  next.options = {.zero_gradients = true, .record_capacity = 4};
  adapter->update(next);
  const auto twin = twin_of(*adapter);
  expect_same_steps(*adapter, *twin);
  const record_batch batch = adapter->get().read_records();
  ASSERT_EQ(batch.records.size(), 3u);
  EXPECT_EQ(batch.records[0].launch, 3u);
  EXPECT_EQ(batch.records[2].step, 5u);
}

TEST_P(Updates, LossScaleGoesOn) {
  test_problem problem = uniform_problem({.name = "group", .learning_rate = 0.1}, 1.0f, 64.0f);
  problem.options.loss_scale = 64.0;
  problem.options.scaling.rule = loss_scale_rule::torch_amp;
  const auto adapter = make(problem);
  const std::vector<float> infinite = {std::numeric_limits<float>::infinity()};
  adapter->write(0, gradient_operand, std::as_bytes(std::span(infinite)));
  adapter->launch();
  problem.groups.push_back({.name = "other"});
  adapter->update(problem);
  EXPECT_EQ(adapter->get().status().next_loss_scale.scale, 32.0f);
  EXPECT_EQ(adapter->get().status().skipped, 1u);
  const std::vector<float> finite = {32.0f};
  adapter->write(0, gradient_operand, std::as_bytes(std::span(finite)));
  adapter->launch();
  EXPECT_NEAR(adapter->first_value(), 0.9, 1e-6);
}

TEST_P(Updates, RefusedPlanChangesNothing) {
  const auto adapter = make(two_groups());
  const auto untouched = make(two_groups());
  adapter->run_with_fresh_gradients(1);
  untouched->run_with_fresh_gradients(1);
  adapter->get().set_learning_rate(1, 0.07);
  untouched->get().set_learning_rate(1, 0.07);
  test_problem next = two_groups();
  next.groups.push_back({.name = "c"});
  const float outside = 0.0f;
  if (GetParam() != executor_kind::host) {
    // Host memory that claims to be an input of kernels.
    next.groups.back().learning_rate_input = &outside;
    EXPECT_THROW(adapter->update(next), error);
    EXPECT_EQ(adapter->get().plan().groups.size(), 2u);
  }
  expect_same_steps(*adapter, *untouched);
}

TEST_P(Updates, A28_StateLoadedAfterLaunchesIsTheEagerResume) {
  const auto saved = make(two_groups());
  saved->run_with_fresh_gradients(4);
  const step_status state = saved->get().status();
  const std::vector<operand_set> contents = saved->read_all();

  // Long since captured and launched, on other contents.
  const auto resumed = make(two_groups());
  resumed->run_with_fresh_gradients(2, 50);
  for (std::size_t t = 0; t < contents.size(); ++t) {
    for (std::size_t operand = 0; operand < operand_count; ++operand) {
      if (!contents[t][operand].empty()) resumed->write(t, operand, contents[t][operand]);
    }
  }
  resumed->get().load_state(state);
  saved->run_with_fresh_gradients(3, 4);
  resumed->run_with_fresh_gradients(3, 4);
  expect_same_bits(saved->problem(), resumed->read_all(), saved->read_all());
  EXPECT_EQ(resumed->get().status().step, 7u);
  EXPECT_EQ(resumed->get().status().groups[1].step, 7u);
}

TEST_P(Updates, A28_CheckpointOfAnotherPlanIsLoadedAndUpdatedTo) {
  const auto saved = make(two_groups());
  saved->run_with_fresh_gradients(4);
  test_problem resumed_problem = two_groups();
  resumed_problem.contents = saved->read_all();
  const auto adapter = make(single_tensor_problem(plain, 10, {.name = "only"}));
  adapter->run_with_fresh_gradients(1);
  adapter->update(resumed_problem);
  adapter->get().load_state(saved->get().status());
  expect_same_steps(*adapter, *saved);
}

/// Changes a problem in one of the ways in which training loops do.
class random_changes {
 public:
  explicit random_changes(std::uint64_t seed) : random_(seed) {}

  void apply(test_problem& problem) {
    switch (below(9)) {
      case 0:
        some_group(problem).learning_rate = 0.001 * static_cast<double>(1 + below(30));
        break;
      case 1: {
        group_options& group = some_group(problem);
        group.beta1 = 0.8;
        group.mode = below(2) == 0 ? weight_decay_mode::l2 : weight_decay_mode::decoupled;
        group.weight_decay = 0.01 * static_cast<double>(below(10));
        break;
      }
      case 2:
        some_group(problem).learning_rate_schedule =
            schedules::table({0.02, 0.01 * static_cast<double>(below(10))});
        break;
      case 3:
        problem.groups.push_back({.name = "group " + std::to_string(serial_++),
                                  .learning_rate = 0.01,
                                  .norm_group = below(2) == 0 ? "" : "norm"});
        break;
      case 4:
        drop_group(problem);
        break;
      case 5:
      case 6:
        add_tensor(problem, "tensor " + std::to_string(serial_++));
        break;
      case 7:
        if (problem.tensors.size() > 1) drop_tensor(problem, below(problem.tensors.size()));
        break;
      default:
        change_options(problem.options);
        break;
    }
    if (problem.tensors.empty()) add_tensor(problem, "tensor " + std::to_string(serial_++));
  }

 private:
  std::uint64_t below(std::uint64_t limit) { return random_.below(limit); }
  group_options& some_group(test_problem& problem) {
    return problem.groups[below(problem.groups.size())];
  }
  void add_tensor(test_problem& problem, std::string name) {
    const update_signature signatures[] = {plain, with_master, narrow};
    problem.add({std::move(name), static_cast<group_id>(below(problem.groups.size())),
                 1 + below(6000), signatures[below(3)]},
                serial_);
  }
  static void drop_tensor(test_problem& problem, std::size_t tensor) {
    problem.tensors.erase(problem.tensors.begin() + static_cast<std::ptrdiff_t>(tensor));
    problem.contents.erase(problem.contents.begin() + static_cast<std::ptrdiff_t>(tensor));
  }
  void drop_group(test_problem& problem) {
    if (problem.groups.size() < 2) return;
    const auto gone = static_cast<group_id>(below(problem.groups.size()));
    problem.groups.erase(problem.groups.begin() + gone);
    for (std::size_t t = problem.tensors.size(); t-- > 0;) {
      if (problem.tensors[t].group == gone) {
        drop_tensor(problem, t);
      } else if (problem.tensors[t].group > gone) {
        --problem.tensors[t].group;
      }
    }
  }
  void change_options(step_options& options) {
    options.max_grad_norm = below(2) == 0 ? 0.0 : 1.0;
    options.skip_non_finite = below(2) == 0;
    options.zero_gradients = below(2) == 0;
    options.stochastic_rounding = below(2) == 0;
    options.count_zeros = below(4) == 0;
    options.record_capacity = static_cast<std::uint32_t>(4 * below(3));
    options.samples_per_step = below(100);
  }

  integer_generator random_;
  int serial_ = 0;
};

TEST_P(Updates, FiftyRandomUpdatesGiveTheBitsOfAFreshExecutor) {
  random_changes changes(20240607);
  const auto adapter = make(two_groups());
  test_problem problem = two_groups();
  for (int round = 0; round < 50; ++round) {
    SCOPED_TRACE(round);
    adapter->run_with_fresh_gradients(1, round);
    changes.apply(problem);
    adapter->update(problem);
    const auto twin = twin_of(*adapter);
    expect_same_steps(*adapter, *twin, 2);
    if (HasFailure()) return;
  }
}

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Updates, one_executor);

}  // namespace
}  // namespace stepgraph::test
