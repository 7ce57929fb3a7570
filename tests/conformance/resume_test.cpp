#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "common/warmed_up.hpp"
#include "conformance/conformance.hpp"

// A28: a state that is loaded into an executor that has already been captured. Tensors are restored
// in place, the numbers by load_state; the next replay goes on as if nothing had happened.
namespace stepgraph::test {
namespace {

class Resume : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Resume, one_executor);

test_problem resumable_problem() {
  using enum storage_format;
  test_problem problem;
  problem.options.loss_scale = 64.0;
  problem.options.scaling = megatron_loss_scaling();
  problem.options.scaling.growth_interval = 3;
  problem.options.max_grad_norm = 0.5;
  problem.options.samples_per_step = 5;
  problem.options.stochastic_rounding = true;
  problem.groups = {
      {.name = "scheduled",
       .learning_rate_schedule = warmed_up(learning_rate_style::cosine, 1e-5, 1e-2, 1e-4, 2, 40)},
      {.name = "ahead", .weight_decay = 0.1, .step = 100}};
  problem.add({"f32", 0, 2100, {}});
  for (const update_signature& signature :
       {update_signature{bf16, bf16, none, bf16, bf16}, update_signature{bf16, f32, remainder},
        update_signature{f16, f16, f32, f16, e4m3, e4m3}}) {
    problem.add({name_of(signature), 1, 700, signature});
  }
  return problem;
}

/// Steps of which some overflow.
void run(executor_adapter& adapter, int steps, int first) {
  for (int step = first; step < first + steps; ++step) {
    for (std::size_t t = 0; t < adapter.problem().tensors.size(); ++t) {
      adapter.write(t, gradient_operand, adapter.problem().gradient_at(t, step));
    }
    if (step % 4 == 1) {
      std::vector<float> gradient(2100, 1.0f);
      gradient[77] = std::numeric_limits<float>::infinity();
      adapter.write_gradient(0, gradient);
    }
    adapter.launch();
  }
}

void restore_tensors(executor_adapter& adapter, const std::vector<operand_set>& saved) {
  for (std::size_t t = 0; t < saved.size(); ++t) {
    for (std::size_t operand = 0; operand < operand_count; ++operand) {
      adapter.write(t, operand, saved[t][operand]);
    }
  }
}

TEST_P(Resume, A28_StateLoadedAfterCaptureGoesOnAsAnUninterruptedRun) {
  const test_problem problem = resumable_problem();
  const auto uninterrupted = make(problem);
  run(*uninterrupted, 7, 0);
  const std::vector<operand_set> saved = uninterrupted->read_all();
  const step_status state = uninterrupted->get().status();
  run(*uninterrupted, 6, 7);

  // The other one has gone elsewhere meanwhile.
  const auto resumed = make(problem);
  run(*resumed, 3, 50);
  resumed->get().set_loss_scale(3.0);
  restore_tensors(*resumed, saved);
  resumed->get().load_state(state);
  run(*resumed, 6, 7);
  expect_same_bits(problem, resumed->read_all(), uninterrupted->read_all());
  expect_same_status(resumed->get().status(), uninterrupted->get().status());
  resumed->expect_guards_intact();
}

TEST_P(Resume, A28_AddressesStayWhereTheCallerPutThem) {
  const auto adapter = make(resumable_problem());
  const auto addresses = [&] {
    std::vector<const void*> found;
    for (const plan_tensor& tensor : adapter->get().plan().tensors) {
      found.push_back(tensor.operands.parameter.data);
      found.push_back(tensor.operands.exp_avg.data);
      found.push_back(tensor.operands.exp_avg_sq.data);
    }
    return found;
  };
  const std::vector<const void*> before = addresses();
  adapter->launch(2);
  const step_status state = adapter->get().status();
  adapter->get().load_state(state);
  adapter->launch();
  EXPECT_EQ(addresses(), before);
  EXPECT_EQ(adapter->get().status().step, state.step + 1);
}

TEST_P(Resume, A28_StateOfOneExecutorLoadsIntoAnyOther) {
  const test_problem problem = resumable_problem();
  const auto host = make_adapter(executor_kind::host, problem);
  run(*host, 5, 0);
  const auto adapter = make(problem);
  restore_tensors(*adapter, host->read_all());
  adapter->get().load_state(host->get().status());
  run(*host, 4, 5);
  run(*adapter, 4, 5);
  expect_same_bits(problem, adapter->read_all(), host->read_all());
  expect_same_status(adapter->get().status(), host->get().status());
}

TEST_P(Resume, StateOfManyGroupsReachesTheNextLaunch) {
  test_problem problem;
  problem.groups.clear();
  for (group_id g = 0; g < 300; ++g) problem.groups.push_back({.name = std::to_string(g)});
  problem.add({"tensor", 7, 10, {}});
  const auto adapter = make(problem);
  step_status state = adapter->get().status();
  state.step = 1000;
  state.samples = 1ull << 40;
  for (group_id g = 0; g < 300; ++g) state.groups[g].step = 10 * g;
  adapter->get().load_state(state);
  adapter->launch();
  const step_status found = adapter->get().status();
  EXPECT_EQ(found.step, 1001u);
  EXPECT_EQ(found.samples, 1ull << 40);
  for (group_id g = 0; g < 300; ++g) EXPECT_EQ(found.groups[g].step, 10 * g + 1);
}

TEST_P(Resume, SamplesCountAppliedStepsAndTheirSizeCanChange) {
  test_problem problem = uniform_problem({.name = "group"}, 1.0f, 1.0f);
  problem.options.skip_non_finite = true;
  problem.options.samples_per_step = 8;
  const auto adapter = make(problem);
  adapter->launch(2);
  EXPECT_EQ(adapter->get().status().samples, 16u);
  adapter->get().set_samples_per_step(100);
  adapter->launch();
  EXPECT_EQ(adapter->get().status().samples, 116u);
  adapter->write_gradient(0, std::vector{std::numeric_limits<float>::infinity()});
  adapter->launch();
  EXPECT_EQ(adapter->get().status().samples, 116u);
}

}  // namespace
}  // namespace stepgraph::test
