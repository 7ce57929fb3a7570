// What it costs to get a step running, and to rebuild it.
//
//   instantiate_bench --benchmark_out=instantiate_bench.json
//
// Names: instantiate/<list>. The time is that of a graph_executor's construction. Counters, of
// medians:
//   plan_us           step_builder: checks and plan
//   construct_us      graph_executor: checks of the memory, tables, capture, instantiation, upload
//   first_launch_us   first launch after that, to its end
//   instantiate_us    instantiation of the captured graph alone
//   graph_update_us   cudaGraphExecUpdate with an identical graph
//   table_bytes       tensor and chunk descriptors, on the device and on the host
//   tensors, chunks

#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "bench_config.hpp"
#include "bench_main.hpp"
#include "benchmark_problem.hpp"
#include "captured_step.hpp"
#include "device_context.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/kernels/tensor_table.hpp"

namespace {

using namespace stepgraph;

void instantiate(benchmark::State& state, const perf::tensor_list& list) {
  using enum storage_format;
  const perf::benchmark_problem problem({f32, f32, none, f32, f32}, list, perf::current_device());
  const step_options options = {.max_grad_norm = 1.0};
  const cuda::unique_stream stream = cuda::make_stream();
  const auto wait = [&] { STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream.get())); };
  stream_executor executor(problem.plan(options), stream.get());
  perf::captured_step captured(executor);
  captured.launch(stream.get());
  wait();

  std::vector<double> plan_seconds, construct_seconds, launch_seconds, instantiate_seconds,
      update_seconds;
  for (auto _ : state) {
    step_plan plan;
    plan_seconds.push_back(perf::wall_seconds([&] { plan = problem.plan(options); }));
    std::unique_ptr<graph_executor> graph;
    construct_seconds.push_back(perf::wall_seconds([&] {
      graph = std::make_unique<graph_executor>(std::move(plan), stream.get());
      wait();
    }));
    launch_seconds.push_back(perf::wall_seconds([&] {
      graph->launch(stream.get());
      wait();
    }));
    instantiate_seconds.push_back(perf::wall_seconds([&] { captured.instantiate(); }));
    update_seconds.push_back(perf::wall_seconds([&] { captured.update(); }));
    state.SetIterationTime(construct_seconds.back());
  }
  std::uint64_t chunks = 0;
  for (const plan_node& node : executor.plan().nodes) {
    if (node.kind == node_kind::update) chunks += node.chunks;
  }
  state.counters["plan_us"] = perf::median(plan_seconds) * 1e6;
  state.counters["construct_us"] = perf::median(construct_seconds) * 1e6;
  state.counters["first_launch_us"] = perf::median(launch_seconds) * 1e6;
  state.counters["instantiate_us"] = perf::median(instantiate_seconds) * 1e6;
  state.counters["graph_update_us"] = perf::median(update_seconds) * 1e6;
  state.counters["table_bytes"] = static_cast<double>(
      problem.tensor_count() * sizeof(tensor_descriptor) + chunks * sizeof(chunk_descriptor));
  state.counters["tensors"] = problem.tensor_count();
  state.counters["chunks"] = static_cast<double>(chunks);
}

void add_benchmarks() {
  for (const perf::tensor_list& list :
       {perf::uniform_list(148, 4096), perf::uniform_list(5000, 4096),
        perf::uniform_list(50000, 1024), perf::one_tensor_groups(465)}) {
    benchmark::RegisterBenchmark(("instantiate/" + list.name).c_str(), instantiate, list)
        ->UseManualTime()
        ->Iterations(15)
        ->Unit(benchmark::kMicrosecond);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return perf::bench_main(argc, argv, perf::add_device_context, add_benchmarks);
}
