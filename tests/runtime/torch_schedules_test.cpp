#include "stepgraph/torch_schedules.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "common/expect_error.hpp"
#include "common/expect_schedule.hpp"
#include "common/reference_torch_schedule.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::test {
namespace {

using namespace schedules;  // NOLINT(google-build-using-namespace)

constexpr std::uint64_t clocks = 100'001;

TEST(TorchSchedules, StepLr) {
  for (const std::uint64_t step_size : {1, 2, 30, 1000, 99'999, 200'000}) {
    for (const double gamma : {0.1, 0.5, 0.97, 1.0, 0.0}) {
      SCOPED_TRACE(::testing::Message() << step_size << " " << gamma);
      const step_lr_options options = {
          .learning_rate = 0.03, .step_size = step_size, .gamma = gamma};
      expect_schedule(step_lr(options), reference_rates(options, clocks));
    }
  }
}

TEST(TorchSchedules, MultiStepLr) {
  const std::vector<std::uint64_t> lists[] = {
      {}, {0}, {1}, {30, 80}, {5, 5, 5, 6, 40'000}, {0, 1, 2, 3, 50'000, 99'999, 100'000, 300'000}};
  for (const std::vector<std::uint64_t>& milestones : lists) {
    for (const double gamma : {0.1, 0.9, 1.3}) {
      SCOPED_TRACE(::testing::PrintToString(milestones));
      const multi_step_lr_options options = {
          .learning_rate = 0.05, .milestones = milestones, .gamma = gamma};
      expect_schedule(multi_step_lr(options), reference_rates(options, clocks));
    }
  }
}

TEST(TorchSchedules, ExponentialLr) {
  for (const double gamma : {0.9, 0.999, 0.9999, 0.9999999, 1.0, 1.0001, 0.0}) {
    SCOPED_TRACE(gamma);
    const exponential_lr_options options = {.learning_rate = 0.3, .gamma = gamma};
    expect_schedule(exponential_lr(options), reference_rates(options, clocks));
  }
}

TEST(TorchSchedules, ConstantLr) {
  for (const std::uint64_t total_iters : {1, 5, 4000, 100'000, 200'000}) {
    for (const double factor : {1.0 / 3.0, 0.5, 1.0, 1e-3}) {
      SCOPED_TRACE(::testing::Message() << total_iters << " " << factor);
      const constant_lr_options options = {
          .learning_rate = 0.05, .factor = factor, .total_iters = total_iters};
      expect_schedule(constant_lr(options), reference_rates(options, clocks));
    }
  }
}

TEST(TorchSchedules, LinearLr) {
  for (const std::uint64_t total_iters : {1, 4, 5, 1000, 100'000, 170'000}) {
    for (const auto& [start, end] :
         {std::pair{1.0 / 3.0, 1.0}, {1.0, 0.1}, {1e-3, 1.0}, {1.0, 1.0}, {1.0, 1e-4}}) {
      SCOPED_TRACE(::testing::Message() << total_iters << " " << start << " " << end);
      const linear_lr_options options = {.learning_rate = 0.07,
                                         .start_factor = start,
                                         .end_factor = end,
                                         .total_iters = total_iters};
      expect_schedule(linear_lr(options), reference_rates(options, clocks));
    }
  }
}

TEST(TorchSchedules, PolynomialLr) {
  for (const std::uint64_t total_iters : {1, 4, 5, 1000, 100'000, 170'000}) {
    for (const double power : {1.0, 2.0, 0.5, 0.9, 0.0, 6.5}) {
      SCOPED_TRACE(::testing::Message() << total_iters << " " << power);
      const polynomial_lr_options options = {
          .learning_rate = 0.02, .total_iters = total_iters, .power = power};
      expect_schedule(polynomial_lr(options), reference_rates(options, clocks));
    }
  }
}

TEST(TorchSchedules, CosineAnnealingLr) {
  for (const std::uint64_t t_max : {1, 2, 3, 10, 777, 10'000, 50'000, 1'000'000}) {
    for (const double eta_min : {0.0, 1e-5, 0.2}) {
      SCOPED_TRACE(::testing::Message() << t_max << " " << eta_min);
      const cosine_annealing_lr_options options = {
          .learning_rate = 0.1, .t_max = t_max, .eta_min = eta_min};
      const schedule tested = cosine_annealing_lr(options);
      expect_schedule(tested, reference_closed_form(options, clocks));
      // Past a long half wave the step-by-step rule is itself off by more than a last place of f32:
      // it rises again from 1 - cos(pi / t_max), of which cancellation leaves few places.
      if (t_max <= 10'000 || t_max >= clocks) {
        expect_schedule(tested, reference_rates(options, clocks));
      }
    }
  }
}

TEST(TorchSchedules, CosineAnnealingWarmRestarts) {
  for (const std::uint64_t t_0 : {1, 7, 1000, 30'000, 150'000}) {
    for (const std::uint64_t t_mult : {1, 2, 3, 1000}) {
      for (const double eta_min : {0.0, 1e-5}) {
        SCOPED_TRACE(::testing::Message() << t_0 << " " << t_mult << " " << eta_min);
        const cosine_annealing_warm_restarts_options options = {
            .learning_rate = 0.1, .t_0 = t_0, .t_mult = t_mult, .eta_min = eta_min};
        expect_schedule(cosine_annealing_warm_restarts(options), reference_rates(options, clocks));
      }
    }
  }
}

TEST(TorchSchedules, OneCycleLr) {
  for (const anneal_strategy strategy : {anneal_strategy::cos, anneal_strategy::linear}) {
    for (const bool three_phase : {false, true}) {
      for (const std::uint64_t total_steps : {1, 2, 7, 101, 4000, 100'001, 130'000}) {
        for (const double pct_start : {0.3, 0.25, 0.0, 1.0, 0.5, 0.61, 0.0123}) {
          SCOPED_TRACE(::testing::Message() << static_cast<int>(strategy) << " " << three_phase
                                            << " " << total_steps << " " << pct_start);
          // torch divides by zero.
          if (pct_start * static_cast<double>(total_steps) == 1.0) continue;
          const one_cycle_lr_options options = {.max_lr = 0.1,
                                                .total_steps = total_steps,
                                                .pct_start = pct_start,
                                                .strategy = strategy,
                                                .three_phase = three_phase};
          std::vector<double> expected = reference_rates(options, clocks);
          // The last rate holds, even where torch's second phase would end later.
          for (std::uint64_t t = total_steps; t < clocks; ++t) expected[t] = 0.1 / 25.0 / 1e4;
          expect_schedule(one_cycle_lr(options), expected);
        }
      }
    }
  }
}

TEST(TorchSchedules, OneCycleWithAFirstPhaseOfNoLengthStartsAtTheTop) {
  const schedule tested = one_cycle_lr({.max_lr = 0.5, .total_steps = 10, .pct_start = 0.1});
  EXPECT_EQ(value_at(tested, 0), 0.5);
  EXPECT_LT(value_at(tested, 1), 0.5);
}

TEST(TorchSchedules, OneCycleUsesItsDivisors) {
  const schedule tested =
      one_cycle_lr({.max_lr = 1.0, .total_steps = 100, .div_factor = 4.0, .final_div_factor = 8.0});
  EXPECT_EQ(value_at(tested, 0), 0.25);
  EXPECT_EQ(value_at(tested, 29), 1.0);
  EXPECT_EQ(value_at(tested, 99), 0.03125);
  EXPECT_EQ(value_at(tested, 1000), 0.03125);
}

TEST(TorchSchedules, SequenceOfAllOfThem) {
  const linear_lr_options linear = {.learning_rate = 0.1, .total_iters = 400};
  const cosine_annealing_lr_options cosine = {.learning_rate = 0.1, .t_max = 900, .eta_min = 1e-3};
  const multi_step_lr_options steps = {.learning_rate = 0.1, .milestones = {0, 10, 500}};
  const one_cycle_lr_options cycle = {.max_lr = 0.2, .total_steps = 3000};
  const multi_step_lr_options more_steps = {.learning_rate = 0.2, .milestones = {100, 200}};
  const cosine_annealing_warm_restarts_options restarts = {
      .learning_rate = 0.1, .t_0 = 50, .t_mult = 2};
  const exponential_lr_options exponential = {.learning_rate = 0.1, .gamma = 0.9998};
  const std::vector<std::uint64_t> milestones = {400, 2500, 2501, 5000, 9000, 30'000};
  expect_schedule(
      sequence({linear_lr(linear), cosine_annealing_lr(cosine), multi_step_lr(steps),
                one_cycle_lr(cycle), multi_step_lr(more_steps),
                cosine_annealing_warm_restarts(restarts), exponential_lr(exponential)},
               milestones),
      reference_sequence({reference_rates(linear, clocks), reference_rates(cosine, clocks),
                          reference_rates(steps, clocks), reference_rates(cycle, clocks),
                          reference_rates(more_steps, clocks), reference_rates(restarts, clocks),
                          reference_rates(exponential, clocks)},
                         milestones, clocks));
}

TEST(TorchSchedules, CountUpdates) {
  EXPECT_EQ(exponential_lr({.learning_rate = 0.1, .gamma = 0.9}).clock, schedule_clock::updates);
  EXPECT_EQ(one_cycle_lr({.max_lr = 0.1, .total_steps = 9}).clock, schedule_clock::updates);
}

template <class Call>
void expect_refusal(Call&& call, const std::vector<std::string>& words) {
  expect_error<usage_error>(call, words);
}

TEST(TorchRefusals, NameTheSchedulerAndTheOption) {
  expect_refusal([] { step_lr({.step_size = 1}); }, {"step_lr", "learning_rate", "nan"});
  expect_refusal([] { step_lr({.learning_rate = 1.0}); }, {"step_lr", "step_size", "0"});
  expect_refusal([] { step_lr({.learning_rate = 1.0, .step_size = 1, .gamma = -0.5}); },
                 {"step_lr", "gamma", "-0.5"});
  expect_refusal(
      [] {
        multi_step_lr({.learning_rate = 1.0, .milestones = {5, 4}});
      },
      {"multi_step_lr", "milestone", "4", "5"});
  expect_refusal([] { exponential_lr({.learning_rate = 1.0}); },
                 {"exponential_lr", "gamma", "nan"});
  expect_refusal([] { constant_lr({.learning_rate = 1.0, .factor = 1.5}); },
                 {"constant_lr", "factor", "1.5"});
  expect_refusal([] { constant_lr({.learning_rate = 1.0, .total_iters = 0}); },
                 {"constant_lr", "total_iters", "0"});
  expect_refusal([] { linear_lr({.learning_rate = 1.0, .start_factor = 0.0}); },
                 {"linear_lr", "start_factor", "0"});
  expect_refusal([] { linear_lr({.learning_rate = 1.0, .end_factor = 2.0}); },
                 {"linear_lr", "end_factor", "2"});
  expect_refusal([] { linear_lr({.learning_rate = 1.0, .total_iters = 0}); },
                 {"linear_lr", "total_iters", "0"});
  expect_refusal([] { polynomial_lr({.learning_rate = 1.0, .total_iters = 0}); },
                 {"polynomial_lr", "total_iters", "0"});
  expect_refusal([] { polynomial_lr({.learning_rate = 1.0, .power = -1.0}); },
                 {"polynomial_lr", "power", "-1"});
  expect_refusal([] { cosine_annealing_lr({.learning_rate = 1.0}); },
                 {"cosine_annealing_lr", "t_max", "0"});
  expect_refusal([] { cosine_annealing_lr({.learning_rate = 1.0, .t_max = 1, .eta_min = -3.0}); },
                 {"cosine_annealing_lr", "eta_min", "-3"});
  expect_refusal([] { cosine_annealing_warm_restarts({.learning_rate = 1.0}); },
                 {"cosine_annealing_warm_restarts", "t_0", "0"});
  expect_refusal(
      [] { cosine_annealing_warm_restarts({.learning_rate = 1.0, .t_0 = 1, .t_mult = 0}); },
      {"cosine_annealing_warm_restarts", "t_mult", "0"});
  expect_refusal([] { one_cycle_lr({.total_steps = 5}); }, {"one_cycle_lr", "max_lr", "nan"});
  expect_refusal([] { one_cycle_lr({.max_lr = 1.0}); }, {"one_cycle_lr", "total_steps", "0"});
  expect_refusal([] { one_cycle_lr({.max_lr = 1.0, .total_steps = 5, .pct_start = 1.5}); },
                 {"one_cycle_lr", "pct_start", "1.5"});
  expect_refusal([] { one_cycle_lr({.max_lr = 1.0, .total_steps = 5, .div_factor = 0.0}); },
                 {"one_cycle_lr", "div_factor", "0"});
  expect_refusal([] { one_cycle_lr({.max_lr = 1.0, .total_steps = 5, .final_div_factor = -1.0}); },
                 {"one_cycle_lr", "final_div_factor", "-1"});
}

}  // namespace
}  // namespace stepgraph::test
