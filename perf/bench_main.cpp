#include "bench_main.hpp"

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "stepgraph_commit.hpp"

namespace stepgraph::perf {
namespace {

/// JSON without the flags of this run, the name of this host, and how the package of Google
/// Benchmark was built, which has no part in what we time.
class plain_json_reporter final : public benchmark::JSONReporter {
 public:
  bool ReportContext(const Context& context) override {
    std::ostream& file = GetOutputStream();
    std::ostringstream text;
    SetOutputStream(&text);
    const bool go_on = benchmark::JSONReporter::ReportContext(context);
    SetOutputStream(&file);
    std::istringstream lines(text.str());
    for (std::string line; std::getline(lines, line);) {
      const bool dropped = line.find("\"host_name\":") != std::string::npos ||
                           line.find("\"library_build_type\":") != std::string::npos;
      if (!dropped) file << line << '\n';
    }
    return go_on;
  }

  void ReportRuns(const std::vector<Run>& runs) override {
    std::vector<Run> plain = runs;
    for (Run& run : plain) {
      run.run_name.iterations.clear();
      run.run_name.time_type.clear();
    }
    benchmark::JSONReporter::ReportRuns(plain);
  }
};

/// A table, in colour on a terminal, that also remembers whether a benchmark failed.
class console_reporter final : public benchmark::ConsoleReporter {
 public:
  console_reporter()
      : benchmark::ConsoleReporter(isatty(STDOUT_FILENO) != 0 ? OO_ColorTabular : OO_Tabular) {}
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) failed_ = failed_ || run.error_occurred;
    benchmark::ConsoleReporter::ReportRuns(runs);
  }
  bool failed() const { return failed_; }

 private:
  bool failed_ = false;
};

bool writes_file(int argc, char** argv) {
  constexpr std::string_view flag = "--benchmark_out=";
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]).substr(0, flag.size()) == flag) return true;
  }
  return false;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

}  // namespace

int bench_main(int argc, char** argv, bool (*add_context)(), void (*add_benchmarks)()) {
  if (char* slash = std::strrchr(argv[0], '/')) argv[0] = slash + 1;
  const bool with_file = writes_file(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  if (!add_context()) return 1;
  add_benchmarks();
  console_reporter display;
  plain_json_reporter file;
  benchmark::RunSpecifiedBenchmarks(&display, with_file ? &file : nullptr);
  benchmark::Shutdown();
  return display.failed() ? 1 : 0;
}

bool add_host_context() {
  benchmark::AddCustomContext("commit", commit);
  benchmark::AddCustomContext("processor", processor_name());
  return true;
}

}  // namespace stepgraph::perf
