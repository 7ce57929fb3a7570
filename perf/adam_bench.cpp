// The update of every tuned signature and of the generic kernel as a replayed graph, in one run
// with the limit that memory sets and with the same kernel launched the regular way.
//
//   adam_bench --benchmark_out=adam_bench.json
//
// Names: adam/<parameter>/<gradient>/<master>/<exp_avg>/<exp_avg_sq>/<tensors>x<elements>
// Counters, of medians: bytes_per_second; stream_ratio (time of the fastest copy kernel / time of
// the step; 1 is the memory's limit); regular_ratio (time of the step / time of the same kernel
// with its scalars passed by value, without a graph); registers and blocks_per_sm of the kernel.

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "bench_config.hpp"
#include "bench_main.hpp"
#include "benchmark_problem.hpp"
#include "device_context.hpp"
#include "device_timer.hpp"
#include "regular_update.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/kernels/cuda_launch.hpp"

namespace {

using namespace stepgraph;

void adam(benchmark::State& state, const update_signature& signature,
          const perf::tensor_list& list) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  STEPGRAPH_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (perf::memory_of(signature, list) > free_bytes / 10 * 9) {
    state.SkipWithError("not enough free device memory");
    return;
  }
  const perf::benchmark_problem problem(signature, list, perf::current_device());
  const cuda::unique_stream stream = cuda::make_stream();
  graph_executor executor(problem.plan(), stream.get());
  const perf::pure_stream limit = problem.stream_limit(stream.get());
  perf::device_timer timer(stream.get());

  const auto step = [&] { executor.launch(stream.get()); };
  const auto copy = [&] { limit.launch(stream.get()); };
  // The generic kernel exists with its terms in device memory only.
  const bool has_regular = is_tuned(signature);
  const perf::regular_update regular_kernel(executor.plan());
  const auto regular = [&] { regular_kernel.launch(stream.get()); };
  for (int i = 0; i < perf::warmup_runs; ++i) {
    step();
    copy();
    if (has_regular) regular();
  }
  const int runs = perf::runs_worth_measuring(timer.seconds(step), 100);
  std::vector<double> step_seconds;
  std::vector<double> copy_seconds;
  std::vector<double> regular_seconds;
  for (auto _ : state) {
    step_seconds.push_back(timer.seconds(step, runs));
    copy_seconds.push_back(timer.seconds(copy, runs));
    if (has_regular) regular_seconds.push_back(timer.seconds(regular, runs));
    state.SetIterationTime(step_seconds.back());
  }

  cuda::kernel_resources resources;
  STEPGRAPH_CUDA_CHECK(cuda::update_kernel_resources(signature, &resources));
  const step_plan& plan = executor.plan();
  const auto bytes = static_cast<double>(plan.bytes_read() + plan.bytes_written());
  const double step_median = perf::median(step_seconds);
  const double copy_median = perf::median(copy_seconds);
  state.SetLabel("limit: " + limit.variant());
  state.counters["median_us"] = step_median * 1e6;
  state.counters["stream_median_us"] = copy_median * 1e6;
  state.counters["bytes_per_second"] = bytes / step_median;
  state.counters["stream_bytes_per_second"] = bytes / copy_median;
  state.counters["stream_ratio"] = copy_median / step_median;
  if (has_regular) {
    const double regular_median = perf::median(regular_seconds);
    state.counters["regular_median_us"] = regular_median * 1e6;
    state.counters["regular_ratio"] = step_median / regular_median;
  }
  state.counters["tuned"] = has_regular ? 1 : 0;
  state.counters["registers"] = resources.registers;
  state.counters["blocks_per_sm"] = resources.max_blocks_per_multiprocessor;
}

void add_benchmark(const update_signature& signature, const perf::tensor_list& list,
                   int iterations) {
  const std::string name = fmt::format("adam/{}/{}", name_of(signature), list.name);
  benchmark::RegisterBenchmark(name.c_str(), adam, signature, list)
      ->UseManualTime()
      ->Iterations(iterations)
      ->Unit(benchmark::kMicrosecond);
}

void add_benchmarks() {
  using enum storage_format;
  const update_signature f32_signature = {f32, f32, none, f32, f32};
  // The configuration of the report that started the project: 201 matrices of 5120 x 4096.
  add_benchmark(f32_signature, perf::uniform_list(201, 20971520), 30);
  add_benchmark(f32_signature, perf::uniform_list(64, 65536), 50);
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq) \
  add_benchmark({parameter, gradient, master, exp_avg, exp_avg_sq},                 \
                perf::uniform_list(1, 1u << 30), 30);
#include "measured_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
}

}  // namespace

int main(int argc, char** argv) {
  return perf::bench_main(argc, argv, perf::add_device_context, add_benchmarks);
}
