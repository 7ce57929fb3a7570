// The whole optimizer step against the least that its parts cost.
//
//   step_bench --benchmark_out=step_bench.json
//
// Names: step/<parameter list>/<parts>, parts of: norm, clip (a norm that scales the update), adam,
// zero (the gradients), report (a step record). Counters, of medians:
//   replay_gpu_us   device time of a replay, of replays back to back
//   replay_cpu_us   processor time of a launch
//   floor_us        the parts, one kernel each: the best copy of the update's operands, CUB's
//                   reduction over the gradients, a memset of them, each timed in this run
//   floor_ratio     replay_gpu_us / floor_us
//   kernel_nodes    of the graph
//   bytes_per_second, tensors

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bench_config.hpp"
#include "bench_main.hpp"
#include "benchmark_problem.hpp"
#include "device_context.hpp"
#include "device_timer.hpp"
#include "step_floor.hpp"
#include "stepgraph/cuda/graph_executor.hpp"

namespace {

using namespace stepgraph;

/// What a measured step does beside Adam.
struct step_parts {
  const char* name;
  bool measures;  ///< reads every gradient first
  bool zeroes;
  step_options options;
};

void step(benchmark::State& state, const perf::tensor_list& list, const step_parts& parts) {
  using enum storage_format;
  const perf::benchmark_problem problem({f32, f32, none, f32, f32}, list, perf::current_device());
  const cuda::unique_stream stream = cuda::make_stream();
  graph_executor executor(problem.plan(parts.options), stream.get());
  const perf::step_floor floor(problem, stream.get());
  perf::device_timer timer(stream.get());

  const auto launch = [&] { executor.launch(stream.get()); };
  for (int i = 0; i < perf::warmup_runs; ++i) launch();
  // A step that zeroes its gradients finds zeros the next time, which cost less power to move. So
  // long steps, which power slows down, run one at a time on restored gradients; short ones, of
  // which events around one would measure themselves, run back to back.
  const bool is_long = timer.seconds(launch) > 200e-6;
  const int runs = is_long ? 1 : perf::runs_worth_measuring(timer.seconds(launch), 200);
  const auto time = [&](auto&& enqueue) {
    if (is_long) floor.restore_gradients(stream.get());
    return timer.seconds(enqueue, runs, perf::head_start_for(runs));
  };
  std::vector<double> gpu, cpu, update, read, zero;
  for (auto _ : state) {
    gpu.push_back(time(launch));
    update.push_back(time([&] { floor.update(stream.get()); }));
    if (parts.measures) read.push_back(time([&] { floor.read_gradients(stream.get()); }));
    if (parts.zeroes) zero.push_back(time([&] { floor.zero_gradients(stream.get()); }));
    for (int i = 0; i < perf::launches_in_flight; ++i) cpu.push_back(perf::wall_seconds(launch));
    STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
    state.SetIterationTime(gpu.back());
  }

  double floor_seconds = perf::median(update);
  if (parts.measures) floor_seconds += perf::median(read);
  if (parts.zeroes) floor_seconds += perf::median(zero);
  const double replay = perf::median(gpu);
  const step_plan& plan = executor.plan();
  const auto nodes = executor.nodes();
  state.counters["replay_gpu_us"] = replay * 1e6;
  state.counters["replay_cpu_us"] = perf::median(cpu) * 1e6;
  state.counters["floor_us"] = floor_seconds * 1e6;
  state.counters["floor_ratio"] = replay / floor_seconds;
  state.counters["kernel_nodes"] = static_cast<double>(nodes.size());
  state.counters["tensors"] = problem.tensor_count();
  state.counters["bytes_per_second"] =
      static_cast<double>(plan.bytes_read() + plan.bytes_written()) / replay;
}

void add_benchmarks() {
  const step_options clip = {.max_grad_norm = 1.0};
  step_options zero = clip;
  zero.zero_gradients = true;
  step_options report = zero;
  report.record_capacity = 256;
  const step_parts measured[] = {{"adam", false, false, {}},
                                 {"clip+adam", true, false, clip},
                                 {"clip+adam+zero", true, true, zero},
                                 {"clip+adam+zero+report", true, true, report}};
  // From short to long: steps of a few microseconds depend on where memory lies, which differs more
  // after that of a long list was given back.
  for (const perf::tensor_list& list :
       {perf::uniform_list(148, 4096), perf::uniform_list(64, 65536),
        perf::model_list("gpt2-124m")}) {
    if (list.numels.empty()) continue;
    for (const step_parts& parts : measured) {
      benchmark::RegisterBenchmark(fmt::format("step/{}/{}", list.name, parts.name).c_str(), step,
                                   list, parts)
          ->UseManualTime()
          ->Iterations(40)
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return perf::bench_main(argc, argv, perf::add_device_context, add_benchmarks);
}
