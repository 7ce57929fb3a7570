// The step on the processor.
//
//   host_bench --benchmark_out=host_bench.json
//
// Names: host/<signature>/<tensors>x<elements>, the AdamW update alone; "/clip" adds the pass over
// the gradients that clipping needs. Counters: bytes_per_second of the median, threads.
// peers.py --device cpu times torch.optim.AdamW(fused=True) beside the same executor.

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <omp.h>

#include <string>
#include <vector>

#include "bench_config.hpp"
#include "bench_main.hpp"
#include "benchmark_problem.hpp"
#include "stepgraph/host_executor.hpp"

namespace {

using namespace stepgraph;

void host(benchmark::State& state, const update_signature& signature, const perf::tensor_list& list,
          const step_options& options) {
  const perf::benchmark_problem problem(signature, list, {});
  host_executor executor(problem.plan(options));
  for (int i = 0; i < perf::warmup_runs; ++i) executor.launch();
  std::vector<double> seconds;
  for (auto _ : state) {
    seconds.push_back(perf::wall_seconds([&] { executor.launch(); }));
    state.SetIterationTime(seconds.back());
  }
  const step_plan& plan = executor.plan();
  const double middle = perf::median(seconds);
  state.counters["median_us"] = middle * 1e6;
  state.counters["bytes_per_second"] =
      static_cast<double>(plan.bytes_read() + plan.bytes_written()) / middle;
  state.counters["threads"] = omp_get_max_threads();
}

void add_benchmarks() {
  using enum storage_format;
  // 512 MB in f32: past every cache, and small enough for any machine.
  const perf::tensor_list list = perf::uniform_list(16, 1u << 21);
  const auto add = [&](const update_signature& signature, const step_options& options,
                       const char* suffix) {
    const std::string name = fmt::format("host/{}/{}{}", name_of(signature), list.name, suffix);
    benchmark::RegisterBenchmark(name.c_str(), host, signature, list, options)
        ->UseManualTime()
        ->Iterations(15)
        ->Unit(benchmark::kMicrosecond);
  };
  add({f32, f32, none, f32, f32}, {}, "");
  add({f32, f32, none, f32, f32}, {.max_grad_norm = 1.0}, "/clip");
  add({bf16, bf16, none, f32, f32}, {}, "");
  add({bf16, bf16, f32, f32, f32}, {}, "");
}

}  // namespace

int main(int argc, char** argv) {
  return perf::bench_main(argc, argv, perf::add_host_context, add_benchmarks);
}
