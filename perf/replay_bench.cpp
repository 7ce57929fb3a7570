// What a step costs beside its memory traffic: processor time of a launch, latency, time on the
// device, as a replayed graph and as the same kernels launched one by one.
//
//   replay_bench --benchmark_out=replay_bench.json
//
// Names: replay/<list>, a step that clips the global norm. Counters, of medians:
//   replay_cpu_us, stream_cpu_us   processor time of one launch
//   replay_gpu_us, stream_gpu_us   device time of one step, of steps back to back
//   latency_us, stream_latency_us  from the start of a launch to its end on an idle device
//   tensors, groups, bytes_per_second

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "bench_config.hpp"
#include "bench_main.hpp"
#include "benchmark_problem.hpp"
#include "device_context.hpp"
#include "device_timer.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"

namespace {

using namespace stepgraph;

/// Everything measured of one way to run the step.
struct step_times {
  std::vector<double> cpu, gpu, latency;
};

/// Measures one way once more. `steps` are run back to back for the device time.
template <class Executor>
void measure(Executor& executor, cudaStream_t stream, perf::device_timer& timer, int steps,
             step_times& times) {
  const auto launch = [&] { executor.launch(stream); };
  // Two kernels a step at most, launched one by one.
  times.gpu.push_back(timer.seconds(launch, steps, perf::head_start_for(2 * steps)));
  for (int i = 0; i < perf::launches_in_flight; ++i) {
    times.cpu.push_back(perf::wall_seconds(launch));
  }
  STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream));
  times.latency.push_back(perf::wall_seconds([&] {
    launch();
    STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream));
  }));
}

void replay(benchmark::State& state, const perf::tensor_list& list) {
  using enum storage_format;
  const perf::benchmark_problem problem({f32, f32, none, f32, f32}, list, perf::current_device());
  const step_options options = {.max_grad_norm = 1.0};
  const cuda::unique_stream stream = cuda::make_stream();
  graph_executor graph(problem.plan(options), stream.get());
  stream_executor one_by_one(problem.plan(options), stream.get());
  perf::device_timer timer(stream.get());
  for (int i = 0; i < perf::warmup_runs; ++i) {
    graph.launch(stream.get());
    one_by_one.launch(stream.get());
  }
  const int steps =
      perf::runs_worth_measuring(timer.seconds([&] { graph.launch(stream.get()); }), 200);
  step_times replayed;
  step_times launched;
  for (auto _ : state) {
    measure(graph, stream.get(), timer, steps, replayed);
    measure(one_by_one, stream.get(), timer, steps, launched);
    state.SetIterationTime(replayed.gpu.back());
  }
  const double replay_gpu = perf::median(replayed.gpu);
  state.counters["replay_cpu_us"] = perf::median(replayed.cpu) * 1e6;
  state.counters["replay_gpu_us"] = replay_gpu * 1e6;
  state.counters["latency_us"] = perf::median(replayed.latency) * 1e6;
  state.counters["stream_cpu_us"] = perf::median(launched.cpu) * 1e6;
  state.counters["stream_gpu_us"] = perf::median(launched.gpu) * 1e6;
  state.counters["stream_latency_us"] = perf::median(launched.latency) * 1e6;
  state.counters["tensors"] = problem.tensor_count();
  state.counters["groups"] = problem.group_count();
  state.counters["bytes_per_second"] =
      static_cast<double>(graph.plan().bytes_read() + graph.plan().bytes_written()) / replay_gpu;
}

void add_benchmarks() {
  for (const perf::tensor_list& list :
       {perf::uniform_list(148, 4096), perf::model_list("gpt2-124m"),
        perf::uniform_list(5000, 4096), perf::uniform_list(50000, 1024),
        perf::one_tensor_groups(465)}) {
    if (list.numels.empty()) continue;
    benchmark::RegisterBenchmark(("replay/" + list.name).c_str(), replay, list)
        ->UseManualTime()
        ->Iterations(50)
        ->Unit(benchmark::kMicrosecond);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return perf::bench_main(argc, argv, perf::add_device_context, add_benchmarks);
}
