// The update of every tuned signature and of the generic kernel as a replayed graph, against a
// kernel that moves the same bytes without arithmetic, in one run.
//
//   adam_bench --benchmark_out=adam_bench.json --benchmark_out_format=json
//
// Names: adam/<parameter>/<gradient>/<master>/<exp_avg>/<exp_avg_sq>/<tensors>x<elements>
// Counters: bytes_per_second and stream_ratio (time of the copy kernel / time of the step; 1 is the
// memory's limit), of medians; registers and blocks_per_sm of the update kernel.

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "benchmark_problem.hpp"
#include "device_context.hpp"
#include "device_timer.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/kernels/cuda_launch.hpp"

namespace {

using namespace stepgraph;

struct shape {
  std::uint32_t tensors;
  std::uint64_t numel;
};

constexpr int warmup_iterations = 5;

void adam(benchmark::State& state, const update_signature& signature, shape size) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  STEPGRAPH_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (perf::memory_of(signature, size.tensors, size.numel) > free_bytes / 10 * 9) {
    state.SkipWithError("not enough free device memory");
    return;
  }
  const perf::benchmark_problem problem(signature, size.tensors, size.numel);
  const cuda::unique_stream stream = cuda::make_stream();
  graph_executor executor(problem.plan(), stream.get());
  perf::device_timer timer(stream.get());
  const auto step = [&] { executor.launch(stream.get()); };
  const auto copy = [&] { problem.launch_pure_stream(stream.get()); };
  for (int i = 0; i < warmup_iterations; ++i) {
    timer.seconds(step);
    timer.seconds(copy);
  }
  std::vector<double> step_seconds;
  std::vector<double> copy_seconds;
  for (auto _ : state) {
    step_seconds.push_back(timer.seconds(step));
    copy_seconds.push_back(timer.seconds(copy));
    state.SetIterationTime(step_seconds.back());
  }
  cuda::kernel_resources resources;
  STEPGRAPH_CUDA_CHECK(cuda::update_kernel_resources(signature, &resources));
  const double step_median = perf::median(step_seconds);
  const double copy_median = perf::median(copy_seconds);
  state.counters["median_us"] = step_median * 1e6;
  state.counters["stream_median_us"] = copy_median * 1e6;
  state.counters["bytes_per_second"] = static_cast<double>(problem.bytes()) / step_median;
  state.counters["stream_bytes_per_second"] = static_cast<double>(problem.bytes()) / copy_median;
  state.counters["stream_ratio"] = copy_median / step_median;
  state.counters["registers"] = resources.registers;
  state.counters["blocks_per_sm"] = resources.max_blocks_per_multiprocessor;
}

void add_benchmark(const update_signature& signature, shape size, int iterations) {
  const std::string name =
      fmt::format("adam/{}/{}x{}", name_of(signature), size.tensors, size.numel);
  benchmark::RegisterBenchmark(name.c_str(), adam, signature, size)
      ->UseManualTime()
      ->Iterations(iterations)
      ->Unit(benchmark::kMicrosecond);
}

std::vector<update_signature> measured_signatures() {
  using enum storage_format;
  std::vector<update_signature> signatures;
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq) \
  signatures.push_back({parameter, gradient, master, exp_avg, exp_avg_sq});
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  signatures.push_back({f16, bf16, f32, f32, f32});  // the generic kernel
  return signatures;
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  if (!perf::add_device_context()) return 1;
  using enum storage_format;
  const update_signature f32_signature = {f32, f32, none, f32, f32};
  // The configuration of the report that started the project: 201 matrices of 5120 x 4096.
  add_benchmark(f32_signature, {201, 20971520}, 30);
  add_benchmark(f32_signature, {64, 65536}, 200);
  for (const update_signature& signature : measured_signatures()) {
    add_benchmark(signature, {1, 1u << 30}, 30);
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
