#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "conformance/conformance.hpp"
#include "soak_memory.hpp"
#include "stepgraph/megatron_schedules.hpp"

// A long run of random setters, re-bound gradients, overflows, restored checkpoints and executors
// built anew, beside a host executor that is only ever told the values: equal bits, flat memory.
//
// STEPGRAPH_SOAK_STEPS: the number of steps (default 200,000 on a GPU, 4,000 on the host).
namespace stepgraph::test {
namespace {

class Soak : public Conformance {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Soak, one_executor);

std::uint64_t steps_of(executor_kind kind) {
  if (const char* const given = std::getenv("STEPGRAPH_SOAK_STEPS")) return std::stoull(given);
  return kind == executor_kind::graph ? 200000 : kind == executor_kind::host ? 4000 : 20000;
}

test_problem soaked_problem() {
  using enum storage_format;
  test_problem problem;
  problem.options.loss_scale = 64.0;
  problem.options.scaling = {.rule = loss_scale_rule::torch_amp, .growth_interval = 100};
  problem.options.max_grad_norm = 1.0;
  problem.options.skip_above_norm = 1e4;
  problem.options.count_zeros = true;
  problem.options.samples_per_step = 7;
  problem.options.record_capacity = 32;
  problem.groups = {
      {.name = "matrices", .weight_decay = 0.1},
      {.name = "biases", .learning_rate = 1e-2, .mode = weight_decay_mode::l2, .maximize = true},
      {.name = "alone", .bias_correction = false}};
  problem.groups[0].learning_rate_schedule =
      schedules::megatron_learning_rate({.style = schedules::megatron_learning_rate_style::cosine,
                                         .maximum = 1e-2,
                                         .minimum = 1e-3,
                                         .warmup = 100,
                                         .decay = 300000});
  problem.groups[2].norm_group = "apart";
  problem.add({"f32", 0, 2500, {}});
  problem.add({"mixed", 1, 700, {bf16, bf16, f32, f32, f32}});
  problem.add({"lossless", 0, 1100, {bf16, f32, remainder, bf16, bf16}, all_offset_by(1)});
  problem.add({"small", 2, 300, {bf16, bf16, remainder, e4m3, e4m3}});
  problem.add({"half", 1, 90, {f16, f16, none, f16, f32}});
  return problem;
}

/// Gradients that steps are bound to in turn; of the last set one element is infinite.
constexpr std::size_t gradient_sets = 5;

operand_bytes gradient_of(const test_problem& problem, std::size_t tensor, std::size_t set) {
  operand_bytes bytes = problem.gradient_at(tensor, static_cast<int>(set));
  if (set != gradient_sets - 1 || tensor != 1) return bytes;
  // 0x7f80 is infinity in bf16.
  bytes[100] = std::byte{0x80};
  bytes[101] = std::byte{0x7f};
  return bytes;
}

/// One executor of the run, with what it takes to build it anew.
class soaked {
 public:
  soaked(executor_kind kind, const test_problem& problem) : kind_(kind), problem_(problem) {
    build(problem_);
  }

  executor& get() { return adapter_->get(); }
  executor_adapter& adapter() { return *adapter_; }
  void launch() { adapter_->launch(); }

  void bind_gradients(std::size_t set) {
    set_ = set;
    for (std::size_t t = 0; t < problem_.tensors.size(); ++t) {
      adapter_->bind(set * problem_.tensors.size() + t);
    }
  }

  /// Stops, and goes on with a new executor in new memory that was told where the old one stood.
  /// The values set by hand are in `groups` and `options`.
  void build_anew(const std::vector<group_options>& groups, const step_options& options,
                  const std::vector<bool>& rate_by_hand) {
    const step_status stood = get().status();
    test_problem next = problem_;
    next.contents = adapter_->read_all();
    next.options = options;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      next.groups[g] = groups[g];
      next.groups[g].learning_rate_schedule = problem_.groups[g].learning_rate_schedule;
    }
    const std::size_t set = set_;
    adapter_.reset();
    build(next);
    get().load_state(stood);
    for (group_id g = 0; g < groups.size(); ++g) {
      if (rate_by_hand[g]) get().set_learning_rate(g, groups[g].learning_rate);
    }
    bind_gradients(set);
  }

 private:
  void build(const test_problem& problem) {
    adapter_ = make_adapter(kind_, problem);
    for (std::size_t set = 0; set < gradient_sets; ++set) {
      for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
        adapter_->add_placement(t, gradient_operand, gradient_of(problem_, t, set), set % 2);
      }
    }
  }

  executor_kind kind_;
  test_problem problem_;
  std::unique_ptr<executor_adapter> adapter_;
  std::size_t set_ = 0;
};

/// A checkpoint in the making or in use.
struct checkpoint {
  std::vector<operand_set> contents;
  step_status status;
};

checkpoint checkpoint_of(soaked& one) { return {one.adapter().read_all(), one.get().status()}; }

/// In place: addresses and captures stay.
void restore(soaked& one, const checkpoint& saved) {
  const test_problem& problem = one.adapter().problem();
  for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
    for (std::size_t operand = 0; operand < operand_count; ++operand) {
      if (operand == gradient_operand || saved.contents[t][operand].empty()) continue;
      one.adapter().write(t, operand, saved.contents[t][operand]);
    }
  }
  one.get().load_state(saved.status);
}

/// The values in force, which a new executor is built with.
struct in_force {
  std::vector<group_options> groups;
  step_options options;
  std::vector<bool> rate_by_hand;
};

/// Sets one random value on both.
void set_something(integer_generator& random, in_force& values, executor& a, executor& b) {
  const auto group = static_cast<group_id>(random.below(values.groups.size()));
  group_options& options = values.groups[group];
  const double value = static_cast<double>(1 + random.below(1000)) * 1e-3;
  const auto both = [&](auto&& set) {
    set(a);
    set(b);
  };
  switch (random.below(8)) {
    case 0:
      options.learning_rate = value * 1e-2;
      values.rate_by_hand[group] = true;
      return both([&](executor& each) { each.set_learning_rate(group, options.learning_rate); });
    case 1:
      options.weight_decay = value * 0.1;
      return both([&](executor& each) { each.set_weight_decay(group, options.weight_decay); });
    case 2:
      options.beta1 = 0.8 + 0.1 * value;
      options.beta2 = 0.99 + 0.009 * value;
      return both([&](executor& each) { each.set_betas(group, options.beta1, options.beta2); });
    case 3:
      options.eps = value * 1e-6;
      return both([&](executor& each) { each.set_eps(group, options.eps); });
    case 4:
      values.options.max_grad_norm = random.below(3) == 0 ? 0.0 : value * 10.0;
      return both([&](executor& each) { each.set_max_grad_norm(values.options.max_grad_norm); });
    case 5:
      values.options.samples_per_step = random.below(100);
      return both(
          [&](executor& each) { each.set_samples_per_step(values.options.samples_per_step); });
    case 6:
      // Overflows halve it, and nobody makes gradients to its measure here.
      values.options.loss_scale = static_cast<double>(1u << random.below(12));
      return both([&](executor& each) { each.set_loss_scale(values.options.loss_scale); });
    default:
      if (!options.learning_rate_schedule) return;
      values.rate_by_hand[group] = false;
      return both([&](executor& each) { each.resume_schedule(group); });
  }
}

TEST_P(Soak, RandomChangesGiveTheBitsOfTheHost) {
  const std::uint64_t steps = steps_of(GetParam());
  const test_problem problem = soaked_problem();
  soaked found(GetParam(), problem);
  soaked expected(executor_kind::host, problem);
  in_force values = {problem.groups, problem.options, std::vector<bool>(problem.groups.size())};
  checkpoint saved_by_found = checkpoint_of(found);
  checkpoint saved_by_expected = checkpoint_of(expected);
  integer_generator random(2026);
  std::size_t free_at_first = 0;
  bool overflowed = false;

  for (std::uint64_t step = 0; step < steps; ++step) {
    // First, because what was set since the last launch is not in the status yet.
    if (random.below(2000) == 0) {
      found.build_anew(values.groups, values.options, values.rate_by_hand);
    }
    if (random.below(8) == 0) set_something(random, values, found.get(), expected.get());
    if (overflowed || random.below(16) == 0) {
      // One in ten has the infinity, for one step.
      const std::uint64_t choice = random.below(40);
      overflowed = choice < 4;
      const std::size_t set = overflowed ? gradient_sets - 1 : choice % (gradient_sets - 1);
      found.bind_gradients(set);
      expected.bind_gradients(set);
    }
    if (random.below(1000) == 0) {
      saved_by_found = checkpoint_of(found);
      saved_by_expected = checkpoint_of(expected);
    }
    if (random.below(1500) == 0) {
      restore(found, saved_by_found);
      restore(expected, saved_by_expected);
    }
    found.launch();
    expected.launch();
    found.get().read_records();
    if (step % 2000 == 1999 || step == steps - 1) {
      SCOPED_TRACE("step " + std::to_string(step));
      expect_same_status(found.get().status(), expected.get().status());
      expect_same_bits(problem, found.adapter().read_all(), expected.adapter().read_all());
      if (HasFailure()) return;
      if (step < 4000) free_at_first = free_memory(GetParam());
    }
  }
  EXPECT_GT(found.get().status().skipped, steps / 1000);
  // Executors and their memory come and go; what stays must not grow.
  constexpr std::size_t tolerance = std::size_t{8} << 20;
  EXPECT_LE(free_at_first, free_memory(GetParam()) + tolerance);
  found.adapter().expect_guards_intact();
}

}  // namespace
}  // namespace stepgraph::test
