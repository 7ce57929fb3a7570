#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "common/expect_error.hpp"
#include "frontends/libtorch_testing.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/megatron_schedules.hpp"
#include "stepgraph/torch_schedules.hpp"

namespace stepgraph::test {
namespace {

class AdamCheckpoint : public on_device {};
STEPGRAPH_ON_EVERY_DEVICE(AdamCheckpoint);

template <class Saved>
std::string saved(const Saved& value) {
  std::ostringstream stream;
  torch::save(value, stream);
  return stream.str();
}

template <class Loaded>
void load(Loaded& value, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::load(value, stream);
}

/// A model of three parameters in two groups and an empty group, with deterministic gradients.
struct small_model {
  std::vector<torch::Tensor> parameters;
  std::unique_ptr<Adam> optimizer;

  explicit small_model(torch::Device device, torch::ScalarType type = torch::kFloat) {
    parameters = {make_parameter(random_values({40, 3}, 1), device, type),
                  make_parameter(random_values({17}, 2), device, type),
                  make_parameter(random_values({0}, 3), device, type)};
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector{parameters[0]});
    groups.emplace_back(std::vector<torch::Tensor>{});
    groups.emplace_back(std::vector{parameters[1], parameters[2]},
                        std::make_unique<AdamOptions>(
                            AdamOptions(3e-3).mode(weight_decay_mode::l2).master_weights(true)));
    optimizer = std::make_unique<Adam>(
        groups, AdamOptions(1e-2).weight_decay(0.1).betas({0.8, 0.99}).master_weights(true),
        StepOptions().max_grad_norm(5.0));
  }

  void run(std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t step = from; step < to; ++step) {
      set_gradients(step);
      optimizer->step();
    }
  }

  void set_gradients(std::uint64_t step) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      set_gradient(parameters[i], random_values(parameters[i].sizes(), 100 * step + i));
    }
  }

  void copy_parameters_of(const small_model& other) {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(other.parameters[i]);
  }
};

void expect_same_model(small_model& actual, small_model& expected) {
  for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
    expect_same_bits(actual.parameters[i], expected.parameters[i]);
    const AdamParamState& a = state_of(*actual.optimizer, actual.parameters[i]);
    const AdamParamState& e = state_of(*expected.optimizer, expected.parameters[i]);
    expect_same_bits(a.exp_avg(), e.exp_avg());
    expect_same_bits(a.exp_avg_sq(), e.exp_avg_sq());
    ASSERT_EQ(a.master().defined(), e.master().defined());
    if (e.master().defined()) expect_same_bits(a.master(), e.master());
  }
  const step_status a = actual.optimizer->status();
  const step_status e = expected.optimizer->status();
  EXPECT_EQ(a.step, e.step);
  ASSERT_EQ(a.groups.size(), e.groups.size());
  for (std::size_t g = 0; g < e.groups.size(); ++g) EXPECT_EQ(a.groups[g].step, e.groups[g].step);
}

void expect_resume_equals_uninterrupted_run(torch::Device device, torch::ScalarType type,
                                            std::uint64_t steps_before_load) {
  small_model uninterrupted(device, type);
  uninterrupted.run(0, 10);

  small_model first(device, type);
  first.run(0, 5);
  const std::string bytes = saved(*first.optimizer);

  small_model resumed(device, type);
  // Steps that the checkpoint must overwrite.
  resumed.run(50, 50 + steps_before_load);
  const std::uint64_t captures = resumed.optimizer->captures();
  resumed.copy_parameters_of(first);
  load(*resumed.optimizer, bytes);
  for (const torch::Tensor& parameter : resumed.parameters) {
    EXPECT_EQ(state_of(*resumed.optimizer, parameter).step(), 5);
  }
  EXPECT_EQ(resumed.optimizer->status().step, 5u);
  resumed.run(5, 10);
  EXPECT_EQ(resumed.optimizer->captures(), std::max<std::uint64_t>(captures, 1));
  expect_same_model(resumed, uninterrupted);
  for (const group_status& group : resumed.optimizer->status().groups) EXPECT_EQ(group.step, 10u);
}

TEST_P(AdamCheckpoint, LoadedBeforeTheFirstStep) {
  expect_resume_equals_uninterrupted_run(device(), torch::kFloat, 0);
}

TEST_P(AdamCheckpoint, LoadedAfterSteps) {
  expect_resume_equals_uninterrupted_run(device(), torch::kFloat, 3);
}

TEST_P(AdamCheckpoint, MastersOfBf16LoadedBeforeTheFirstStep) {
  expect_resume_equals_uninterrupted_run(device(), torch::kBFloat16, 0);
}

TEST_P(AdamCheckpoint, MastersOfF16LoadedAfterSteps) {
  expect_resume_equals_uninterrupted_run(device(), torch::kHalf, 3);
}

TEST_P(AdamCheckpoint, LoadingCopiesInPlaceAndKeepsTheCapturedStep) {
  small_model model(device(), torch::kBFloat16);
  model.run(0, 2);
  const std::string bytes = saved(*model.optimizer);
  const AdamParamState before = state_of(*model.optimizer, model.parameters[0]);
  model.run(2, 4);
  load(*model.optimizer, bytes);
  const AdamParamState& after = state_of(*model.optimizer, model.parameters[0]);
  EXPECT_EQ(after.exp_avg().data_ptr(), before.exp_avg().data_ptr());
  EXPECT_EQ(after.exp_avg_sq().data_ptr(), before.exp_avg_sq().data_ptr());
  EXPECT_EQ(after.master().data_ptr(), before.master().data_ptr());
  model.run(4, 5);
  EXPECT_EQ(model.optimizer->captures(), 1u);
  EXPECT_EQ(model.optimizer->rebinds(), 0u);
  EXPECT_EQ(model.optimizer->status().step, 3u);
}

TEST_P(AdamCheckpoint, SavingRightAfterLoadingGivesTheSameCounts) {
  small_model first(device());
  first.run(0, 5);
  for (const std::uint64_t steps_before : {0u, 2u}) {
    small_model second(device());
    second.run(0, steps_before);
    load(*second.optimizer, saved(*first.optimizer));
    small_model third(device());
    load(*third.optimizer, saved(*second.optimizer));
    const step_status status = third.optimizer->status();
    EXPECT_EQ(status.step, 5u);
    ASSERT_EQ(status.groups.size(), 3u);
    for (const group_status& group : status.groups) EXPECT_EQ(group.step, 5u);
    expect_same_bits(state_of(*third.optimizer, third.parameters[0]).exp_avg(),
                     state_of(*first.optimizer, first.parameters[0]).exp_avg());
  }
}

TEST_P(AdamCheckpoint, OptionsComeFromTheCheckpoint) {
  small_model first(device());
  first.optimizer->param_groups()[0].options().set_lr(0.5);
  first.optimizer->set_loss_scale(4.0);
  first.optimizer->set_max_grad_norm(3.0);
  first.run(0, 1);
  small_model second(device());
  load(*second.optimizer, saved(*first.optimizer));
  const auto& options =
      static_cast<const AdamOptions&>(second.optimizer->param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.5);
  EXPECT_EQ(options.betas(), std::make_tuple(0.8, 0.99));
  EXPECT_EQ(static_cast<const AdamOptions&>(second.optimizer->param_groups()[2].options()).mode(),
            weight_decay_mode::l2);
  second.copy_parameters_of(first);
  first.run(1, 3);
  second.run(1, 3);
  EXPECT_EQ(second.optimizer->status().loss_scale, 4.0);
  expect_same_model(second, first);
}

TEST_P(AdamCheckpoint, ScheduleGoesOnWhereItWas) {
  const schedule schedule = schedules::megatron_learning_rate(
      {.maximum = 0.1, .warmup = 3, .decay = 20, .clock = schedule_clock::updates});
  const auto make = [&](const std::optional<stepgraph::schedule>& own) {
    const torch::Tensor p = constant_parameter(1.0, device());
    set_gradient(p, 1.0);
    return Adam({p}, AdamOptions(0.7).schedule(own));
  };
  Adam first = make(schedule);
  for (int step = 0; step < 5; ++step) first.step();
  Adam second = make(std::nullopt);
  load(second, saved(first));
  second.step();
  EXPECT_EQ(second.status().groups.at(0).learning_rate, value_at(schedule, 5));

  // Held by hand: stays held in a fresh optimizer and in one that has stepped.
  first.param_groups()[0].options().set_lr(0.25);
  const std::string held = saved(first);
  Adam third = make(schedule);
  load(third, held);
  load(second, held);
  for (Adam* optimizer : {&second, &third}) {
    optimizer->step();
    EXPECT_EQ(optimizer->status().groups.at(0).learning_rate, 0.25);
    optimizer->resume_schedule(0);
    optimizer->step();
    EXPECT_EQ(optimizer->status().groups.at(0).learning_rate, value_at(schedule, 6));
  }
  // And a checkpoint without it gives the rate back to the schedule.
  third.param_groups()[0].options().set_lr(0.3);
  third.step();
  load(third, saved(second));
  third.step();
  EXPECT_EQ(third.status().groups.at(0).learning_rate, value_at(schedule, 7));
}

TEST_P(AdamCheckpoint, SavedBeforeAnyStepStartsOver) {
  small_model fresh(device(), torch::kBFloat16);
  small_model used(device(), torch::kBFloat16);
  const std::string bytes = saved(*fresh.optimizer);
  used.run(20, 23);
  used.copy_parameters_of(fresh);
  load(*used.optimizer, bytes);
  EXPECT_EQ(used.optimizer->status().step, 0u);
  used.run(0, 4);
  fresh.run(0, 4);
  expect_same_model(used, fresh);
}

TEST_P(AdamCheckpoint, SavedOnTheCpuResumesHere) {
  small_model on_cpu(torch::kCPU, torch::kBFloat16);
  on_cpu.run(0, 4);
  const std::string bytes = saved(*on_cpu.optimizer);
  for (const std::uint64_t steps_before : {0u, 2u}) {
    small_model here(device(), torch::kBFloat16);
    here.run(0, steps_before);
    here.copy_parameters_of(on_cpu);
    load(*here.optimizer, bytes);
    here.run(4, 8);
    small_model expected(torch::kCPU, torch::kBFloat16);
    expected.run(0, 8);
    expect_same_model(here, expected);
  }
}

TEST_P(AdamCheckpoint, LoadsWhatTorchAdamWSaved) {
  const std::vector<torch::Tensor> theirs = {make_parameter(random_values({20}, 1), torch::kCPU),
                                             make_parameter(random_values({5}, 2), torch::kCPU)};
  torch::optim::AdamW reference(theirs, torch::optim::AdamWOptions(0.02).weight_decay(0.3));
  const auto set_gradients = [](const std::vector<torch::Tensor>& parameters, std::uint64_t step) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      set_gradient(parameters[i], random_values(parameters[i].sizes(), 10 * step + i));
    }
  };
  for (std::uint64_t step = 0; step < 4; ++step) {
    set_gradients(theirs, step);
    reference.step();
  }
  const std::vector<torch::Tensor> ours = {make_parameter(theirs[0].detach(), device()),
                                           make_parameter(theirs[1].detach(), device())};
  Adam optimizer(ours, AdamOptions(0.5));
  load(optimizer, saved(reference));
  EXPECT_EQ(optimizer.status().step, 4u);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.02);
  for (std::uint64_t step = 4; step < 8; ++step) {
    set_gradients(ours, step);
    set_gradients(theirs, step);
    optimizer.step();
    reference.step();
  }
  for (std::size_t i = 0; i < 2; ++i) EXPECT_LT(relative_difference(ours[i], theirs[i]), 2e-6);
  EXPECT_EQ(optimizer.status().groups.at(0).step, 8u);
}

TEST_P(AdamCheckpoint, TorchAdamWLoadsWhatWeSaved) {
  const torch::Tensor ours = make_parameter(random_values({20}, 1), device());
  Adam optimizer({ours}, AdamOptions(0.02).weight_decay(0.3));
  for (std::uint64_t step = 0; step < 4; ++step) {
    set_gradient(ours, random_values({20}, 10 + step));
    optimizer.step();
  }
  const torch::Tensor theirs = make_parameter(ours.detach(), device());
  torch::optim::AdamW reference({theirs}, torch::optim::AdamWOptions(0.5));
  load(reference, saved(optimizer));
  for (std::uint64_t step = 4; step < 8; ++step) {
    set_gradient(ours, random_values({20}, 10 + step));
    set_gradient(theirs, random_values({20}, 10 + step));
    optimizer.step();
    reference.step();
  }
  EXPECT_LT(relative_difference(ours, theirs), 2e-6);
}

TEST_P(AdamCheckpoint, RefusesOtherGroupsAndSizesAndChangesNothing) {
  small_model model(device());
  model.run(0, 2);
  const auto before = clones({state_of(*model.optimizer, model.parameters[0]).exp_avg()});
  const auto expect_refused = [&](Adam& other, const std::vector<std::string>& words) {
    other.param_groups()[0].options().set_lr(0.9);
    expect_error<usage_error>([&] { load(*model.optimizer, saved(other)); }, words);
    EXPECT_EQ(model.optimizer->param_groups()[0].options().get_lr(), 1e-2);
    EXPECT_EQ(model.optimizer->status().step, 2u);
    expect_same_bits(state_of(*model.optimizer, model.parameters[0]).exp_avg(), before[0]);
  };
  Adam one_group({constant_parameter(1.0, device())});
  expect_refused(one_group, {"1 parameter groups", "expected 3"});

  const auto three_groups = [&](int64_t first, int64_t second) {
    std::vector<OptimizerParamGroup> groups;
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{first}, {}, {second, int64_t{0}}}) {
      std::vector<torch::Tensor> parameters;
      for (const int64_t size : sizes) {
        parameters.push_back(constant_parameter(1.0, device(), size));
        set_gradient(parameters.back(), 1.0);
      }
      groups.emplace_back(parameters);
    }
    auto optimizer = std::make_unique<Adam>(groups);
    optimizer->step();
    return optimizer;
  };
  expect_refused(*three_groups(120, 17), {"group 0 parameter 0", "[120]", "[40, 3]"});
}

TEST_P(AdamCheckpoint, RefusesAmsgrad) {
  const torch::Tensor p = constant_parameter(1.0, torch::kCPU);
  set_gradient(p, 1.0);
  torch::optim::Adam reference({p}, torch::optim::AdamOptions().amsgrad(true));
  reference.step();
  Adam optimizer({constant_parameter(1.0, device())});
  expect_error<usage_error>([&] { load(optimizer, saved(reference)); }, {"amsgrad"});
}

TEST_P(AdamCheckpoint, RefusesAGroupWhoseParametersAreAtDifferentSteps) {
  const torch::Tensor p = constant_parameter(1.0, torch::kCPU);
  const torch::Tensor q = constant_parameter(1.0, torch::kCPU);
  torch::optim::AdamW reference({p, q});
  set_gradient(p, 1.0);
  reference.step();
  set_gradient(q, 1.0);
  reference.step();
  Adam optimizer({constant_parameter(1.0, device()), constant_parameter(1.0, device())});
  expect_error<usage_error>([&] { load(optimizer, saved(reference)); },
                            {"group 0 parameter 1", "step 1", "expected 2"});
}

TEST_P(AdamCheckpoint, GroupAddedSinceTheLastStepIsLoadedToo) {
  small_model reference(device());
  reference.run(0, 3);
  small_model model(device());
  model.run(0, 1);
  // Both get a group more; the reference has stepped it.
  const torch::Tensor added = constant_parameter(1.0, device());
  const torch::Tensor added_to_model = constant_parameter(1.0, device());
  set_gradient(added, 1.0);
  set_gradient(added_to_model, 1.0);
  reference.optimizer->add_param_group(OptimizerParamGroup({added}));
  reference.run(3, 5);
  model.optimizer->add_param_group(OptimizerParamGroup({added_to_model}));
  model.copy_parameters_of(reference);
  load(*model.optimizer, saved(*reference.optimizer));
  {
    const torch::NoGradGuard no_grad;
    added_to_model.copy_(added);
  }
  model.run(5, 8);
  reference.run(5, 8);
  expect_same_model(model, reference);
  expect_same_bits(added_to_model, added);
  EXPECT_EQ(model.optimizer->status().groups.at(3).step, 5u);
}

TEST_P(AdamCheckpoint, OptionsCompareByValue) {
  EXPECT_TRUE(AdamOptions(0.1) == AdamOptions(0.1));
  EXPECT_FALSE(AdamOptions(0.1) == AdamOptions(0.2));
  EXPECT_FALSE(AdamOptions() == AdamOptions().maximize(true));
  const schedule one = schedules::constant(0.1);
  EXPECT_FALSE(AdamOptions() == AdamOptions().schedule(one));
  EXPECT_TRUE(AdamOptions().schedule(one) == AdamOptions().schedule(one));
  EXPECT_FALSE(AdamOptions().schedule(one) == AdamOptions().schedule(schedules::constant(0.2)));
  EXPECT_FALSE(AdamOptions().weight_decay_schedule(one) == AdamOptions().schedule(one));
  const torch::Tensor rate = torch::ones({}, torch::kFloat);
  EXPECT_TRUE(AdamOptions().lr_tensor(rate) == AdamOptions().lr_tensor(rate));
  EXPECT_FALSE(AdamOptions().lr_tensor(rate) == AdamOptions().lr_tensor(rate.clone()));
}

TEST_P(AdamCheckpoint, EveryFieldOfASchedule) {
  const schedule rate = schedules::sequence(
      {schedules::megatron_learning_rate({.style = schedules::megatron_learning_rate_style::wsd,
                                          .initial = 1e-5,
                                          .maximum = 0.1,
                                          .minimum = 0.01,
                                          .warmup = 7,
                                          .decay = 30,
                                          .wsd_decay = 9}),
       schedules::scaled(schedules::table({0.3, 0.2, 0.1}, schedule_clock::samples), 0.7),
       schedules::scaled(schedules::constant(0.1, schedule_clock::samples), 0.5)},
      {40, 50});
  const schedule decay = schedules::cosine_annealing_warm_restarts(
      {.learning_rate = 0.3, .t_0 = 5, .t_mult = 3, .eta_min = 0.01});
  Adam first({constant_parameter(1.0, device())},
             AdamOptions(0.7).schedule(rate).weight_decay_schedule(decay));
  Adam second({constant_parameter(1.0, device())});
  load(second, saved(first));
  const auto& options = static_cast<const AdamOptions&>(second.param_groups()[0].options());
  EXPECT_EQ(options.schedule(), rate);
  EXPECT_EQ(options.weight_decay_schedule(), decay);
  // And that there is none.
  Adam third({constant_parameter(1.0, device())});
  load(second, saved(third));
  EXPECT_FALSE(options.schedule().has_value());
  EXPECT_FALSE(options.weight_decay_schedule().has_value());
}

TEST_P(AdamCheckpoint, WeightDecayHeldByHandStaysHeld) {
  const schedule decay = schedules::step_lr({.learning_rate = 0.4, .step_size = 1, .gamma = 0.5});
  const auto make = [&] {
    const torch::Tensor p = constant_parameter(1.0, device());
    set_gradient(p, 1.0);
    return Adam({p}, AdamOptions(0.1).weight_decay_schedule(decay));
  };
  Adam first = make();
  first.step();
  static_cast<AdamOptions&>(first.param_groups()[0].options()).weight_decay(0.9);
  Adam second = make();
  load(second, saved(first));
  second.step();
  EXPECT_EQ(second.status().groups.at(0).weight_decay, 0.9);
  second.resume_weight_decay_schedule(0);
  second.step();
  EXPECT_EQ(second.status().groups.at(0).weight_decay, value_at(decay, 2));
}

}  // namespace
}  // namespace stepgraph::test
