// Ways to change a learning rate, or where a gradient lies, between two replays, and what else is
// done for the same end.
//
//   update_bench --benchmark_out=update_bench.json
//
// Names: update/<way>/<groups>groups: 465 tensors of 4,096 elements in one group or in a group
// each; the way changes every group, or what its name says. Counters, of medians:
//   change_cpu_us  processor time of the change alone, all groups together
//   added_cpu_us   processor time of change and launch, less that of a launch without change
//   added_gpu_us   device time of change and step back to back, less that of a step without change
//   step_cpu_us, step_gpu_us  those of the step without change, in the same run

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench_config.hpp"
#include "bench_main.hpp"
#include "benchmark_problem.hpp"
#include "captured_step.hpp"
#include "device_context.hpp"
#include "device_timer.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/megatron_schedules.hpp"

namespace {

using namespace stepgraph;

constexpr std::uint32_t tensor_count = 465;
constexpr update_signature f32_signature = {storage_format::f32, storage_format::f32,
                                            storage_format::none, storage_format::f32,
                                            storage_format::f32};

/// Everything the ways work on.
struct workbench {
  perf::benchmark_problem problem;
  cuda::unique_stream stream = cuda::make_stream();
  graph_executor executor;
  stream_executor captured_executor;
  perf::captured_step captured;
  perf::operand_memory other_gradients;  ///< of the same layout, to re-bind to
  cuda::unique_device_memory scalars;    ///< a learning rate of each group
  cuda::unique_pinned_memory pinned;     ///< where their new values come from
  int changes = 0;

  explicit workbench(const perf::tensor_list& list, const group_options& group)
      : problem(f32_signature, list, perf::current_device()),
        executor(problem.plan({}, group), stream.get()),
        captured_executor(problem.plan({}, group), stream.get()),
        captured(captured_executor),
        other_gradients(perf::random_operand(storage_format::f32, tensor_count * 4096,
                                             {-0.01f, 0.01f, 99}, perf::current_device())),
        scalars(cuda::allocate_device(tensor_count * sizeof(float))),
        pinned(cuda::allocate_pinned(tensor_count * sizeof(float))) {
    auto* values = static_cast<float*>(pinned.get());
    std::fill(values, values + tensor_count, 1e-4f);
    STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
  }

  std::uint32_t groups() const { return problem.group_count(); }

  /// Alternates between the two gradients of a tensor, so that every call changes something.
  binding other_gradient(tensor_id tensor) {
    void* address = changes % 2 == 0
                        ? static_cast<float*>(other_gradients.get()) + std::size_t{tensor} * 4096
                        : problem.address(operand_kind::gradient, tensor);
    return {tensor, operand_kind::gradient, address};
  }

  void rebind_gradient(tensor_id tensor) {
    const binding one = other_gradient(tensor);
    executor.rebind(std::span(&one, 1));
  }

  /// As a framework does, which knows where its memory is.
  void rebind_known_gradients() {
    std::vector<binding> all;
    for (tensor_id tensor = 0; tensor < tensor_count; ++tensor) {
      all.push_back(other_gradient(tensor));
      all.back().of_the_device = true;
    }
    executor.rebind(all);
  }
};

/// A way: what happens before each launch, and what is launched.
struct way {
  std::string name;
  std::function<void(workbench&)> change;
  bool enqueues_per_group = false;  ///< the change enqueues something for each group
  bool by_hand = false;             ///< launches the graph captured by hand, not the executor
  bool waits = false;               ///< the change waits for the device
  bool scheduled = false;           ///< the plan's groups have a schedule
};

std::vector<way> ways() {
  std::vector<way> result;
  result.push_back({.name = "schedule", .change = [](workbench&) {}, .scheduled = true});
  result.push_back({.name = "setter", .change = [](workbench& bench) {
                      const double value = 1e-4 * (1.0 + bench.changes % 7);
                      for (group_id group = 0; group < bench.groups(); ++group) {
                        bench.executor.set_learning_rate(group, value);
                      }
                    }});
  result.push_back({.name = "rebind_one_gradient",
                    .change = [](workbench& bench) { bench.rebind_gradient(0); }});
  result.push_back({.name = "rebind_all_gradients", .change = [](workbench& bench) {
                      for (tensor_id i = 0; i < tensor_count; ++i) bench.rebind_gradient(i);
                    }});
  result.push_back({.name = "rebind_all_known_gradients",
                    .change = [](workbench& bench) { bench.rebind_known_gradients(); }});
  result.push_back({.name = "memcpy_from_pinned",
                    .change =
                        [](workbench& bench) {
                          auto* target = static_cast<float*>(bench.scalars.get());
                          auto* source = static_cast<const float*>(bench.pinned.get());
                          for (group_id group = 0; group < bench.groups(); ++group) {
                            STEPGRAPH_CUDA_CHECK(
                                cudaMemcpyAsync(target + group, source + group, sizeof(float),
                                                cudaMemcpyHostToDevice, bench.stream.get()));
                          }
                        },
                    .enqueues_per_group = true});
  result.push_back({.name = "scalar_kernel",
                    .change =
                        [](workbench& bench) {
                          auto* target = static_cast<float*>(bench.scalars.get());
                          for (group_id group = 0; group < bench.groups(); ++group) {
                            STEPGRAPH_CUDA_CHECK(perf::cuda_launch_store_scalar(
                                target + group, 1e-4f, bench.stream.get()));
                          }
                        },
                    .enqueues_per_group = true});
  result.push_back(
      {.name = "kernel_node_parameters",
       .change = [](workbench& bench) { bench.captured.set_first_kernel_parameters(); },
       .by_hand = true});
  result.push_back({.name = "whole_graph_update",
                    .change = [](workbench& bench) { bench.captured.update(); },
                    .by_hand = true});
  result.push_back({.name = "instantiate_again",
                    .change =
                        [](workbench& bench) {
                          // An executable in use must not be destroyed; a real program would wait
                          // here as well.
                          STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(bench.stream.get()));
                          bench.captured.instantiate();
                        },
                    .by_hand = true,
                    .waits = true});
  return result;
}

void update(benchmark::State& state, const way& measured, const perf::tensor_list& list) {
  group_options constant = {.learning_rate = 1e-4, .weight_decay = 0.01};
  group_options group = constant;
  if (measured.scheduled) {
    group.learning_rate_schedule =
        schedules::megatron_learning_rate({.style = schedules::megatron_learning_rate_style::cosine,
                                           .maximum = 1e-4,
                                           .minimum = 1e-5,
                                           .warmup = 10,
                                           .decay = 1000000,
                                           .clock = schedule_clock::updates});
  }
  workbench bench(list, group);
  // A schedule runs inside the step: the step without change is that of another plan.
  std::unique_ptr<graph_executor> unscheduled;
  if (measured.scheduled) {
    unscheduled =
        std::make_unique<graph_executor>(bench.problem.plan({}, constant), bench.stream.get());
  }
  const auto launch = [&] {
    if (measured.by_hand) {
      bench.captured.launch(bench.stream.get());
    } else {
      bench.executor.launch(bench.stream.get());
    }
  };
  const auto unchanged = [&] {
    if (unscheduled) {
      unscheduled->launch(bench.stream.get());
    } else {
      launch();
    }
  };
  const auto change = [&] {
    measured.change(bench);
    ++bench.changes;
  };
  const auto changed = [&] {
    change();
    launch();
  };

  // Ways that enqueue something for each group fill the driver's queue sooner.
  const int launches =
      measured.enqueues_per_group
          ? std::clamp(500 / static_cast<int>(bench.groups() + 1), 1, perf::launches_in_flight)
          : perf::launches_in_flight;
  perf::device_timer timer(bench.stream.get());
  double changed_seconds = 0.0;
  for (int i = 0; i < perf::warmup_runs; ++i) {
    unchanged();
    changed_seconds = perf::wall_seconds(changed);
    STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(bench.stream.get()));
  }
  // Long enough for everything to be enqueued, unless the way itself waits for the device.
  const double head_start = measured.waits ? 0.0 : 200e-6 + 2.0 * launches * changed_seconds;
  std::vector<double> step_cpu, step_gpu, change_cpu, changed_cpu, changed_gpu;
  for (auto _ : state) {
    step_gpu.push_back(timer.seconds(unchanged, launches, head_start));
    changed_gpu.push_back(timer.seconds(changed, launches, head_start));
    for (int i = 0; i < launches; ++i) step_cpu.push_back(perf::wall_seconds(unchanged));
    STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(bench.stream.get()));
    for (int i = 0; i < launches; ++i) {
      change_cpu.push_back(perf::wall_seconds(change));
      changed_cpu.push_back(change_cpu.back() + perf::wall_seconds(launch));
    }
    STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(bench.stream.get()));
    state.SetIterationTime(changed_cpu.back());
  }
  state.counters["change_cpu_us"] = perf::median(change_cpu) * 1e6;
  state.counters["added_cpu_us"] = (perf::median(changed_cpu) - perf::median(step_cpu)) * 1e6;
  state.counters["added_gpu_us"] = (perf::median(changed_gpu) - perf::median(step_gpu)) * 1e6;
  state.counters["step_cpu_us"] = perf::median(step_cpu) * 1e6;
  state.counters["step_gpu_us"] = perf::median(step_gpu) * 1e6;
}

void add_benchmarks() {
  perf::tensor_list one_group = perf::one_tensor_groups(tensor_count);
  one_group.group_per_tensor = false;
  one_group.name = "1groups";
  for (const perf::tensor_list& list : {one_group, perf::one_tensor_groups(tensor_count)}) {
    for (const way& measured : ways()) {
      const std::string name = fmt::format("update/{}/{}", measured.name, list.name);
      benchmark::RegisterBenchmark(name.c_str(), update, measured, list)
          ->UseManualTime()
          ->Iterations(50)
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return perf::bench_main(argc, argv, perf::add_device_context, add_benchmarks);
}
