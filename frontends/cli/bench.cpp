#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include "bench_cases.hpp"
#include "bench_report.hpp"
#include "command.hpp"
#include "progress_line.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::cli {
namespace {

struct bench_settings {
  std::string device = "auto";
  std::optional<std::uint64_t> memory_mb;
  int repetitions = 7;
  std::string json_path;
};

std::unique_ptr<bench_machine> find_machine(const std::string& device) {
  if (device == "cpu") return make_host_machine();
  std::string why_not = "this program was built without CUDA";
#if defined(STEPGRAPH_HAS_CUDA)
  if (std::unique_ptr<bench_machine> machine = make_cuda_machine(why_not)) return machine;
#endif
  if (device == "cuda") throw error(fmt::format("--device cuda: {}", why_not));
  fmt::print(stderr, "stepgraph: measuring on the CPU: {}\n", why_not);
  return make_host_machine();
}

int bench(const bench_settings& settings) {
  require_writable(settings.json_path);
  const std::unique_ptr<bench_machine> machine = find_machine(settings.device);
  const bool on_gpu = machine->executor() == "graph";
  // A short run: more than this shows nothing new.
  const std::uint64_t usual_mb = on_gpu ? 16384 : 1024;
  const std::uint64_t limit =
      std::min(machine->memory_bytes(), settings.memory_mb.value_or(usual_mb) * 1000000);

  bench_result result;
  result.executor = machine->executor();
  result.device = machine->device();
  const std::uint64_t most = on_gpu ? 2000000000 : 256000000;
  result.copy_gb_s =
      machine->copy_gb_s(std::clamp(limit / 2, std::uint64_t{1} << 20, most), settings.repetitions);
  std::vector<bench_case> cases = bench_cases(on_gpu);
  const auto fits = [&](const bench_case& measured) { return measured.memory_bytes() <= limit; };
  const auto first_left_out = std::stable_partition(cases.begin(), cases.end(), fits);
  result.left_out.assign(first_left_out, cases.end());
  cases.erase(first_left_out, cases.end());
  {
    progress_line progress("bench", static_cast<std::int64_t>(cases.size()));
    for (const bench_case& measured : cases) {
      result.rows.push_back({measured, machine->run(measured, settings.repetitions)});
      progress.update(static_cast<std::int64_t>(result.rows.size()),
                      fmt::format("{}  {}", measured.list, name_of(measured.signature)));
    }
  }
  if (!settings.json_path.empty()) write_output(settings.json_path, json_of(result));
  if (settings.json_path != "-") write_output("-", text_of(result));
  return exit_success;
}

}  // namespace

command add_bench(CLI::App& program) {
  const auto settings = std::make_shared<bench_settings>();
  CLI::App* app = program.add_subcommand(
      "bench",
      "Measure a few steps beside a plain copy of memory, in about a minute: by the graph executor "
      "on a GPU, by the host executor elsewhere.");
  app->add_option("--device", settings->device, "Where to measure")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app->add_option("--memory", settings->memory_mb,
                  "Leave out what needs more memory, in MB; default: 16384 on a GPU, else 1024, "
                  "and half of what is free")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 24))
      ->default_str("");
  app->add_option("--repetitions", settings->repetitions, "Measurements of a case")
      ->check(CLI::Range(1, 1000));
  app->add_option("--json", settings->json_path, "Write the result as JSON; '-': standard output")
      ->type_name("FILE");
  return {app, [settings] { return bench(*settings); }};
}

}  // namespace stepgraph::cli
