#pragma once

namespace stepgraph::perf {

/// The body of a program's main: reads Google Benchmark's flags, describes the machine in the
/// context, registers and runs. The JSON file (--benchmark_out) holds the names as registered,
/// without Google Benchmark's suffixes, and neither the host's name nor a directory. Returns the
/// exit status; not 0 when a benchmark reported an error.
///
/// `add_context` returns false, after a message on stderr, where the program cannot run.
int bench_main(int argc, char** argv, bool (*add_context)(), void (*add_benchmarks)());

/// Adds the source revision and the processor's name to the context.
bool add_host_context();

}  // namespace stepgraph::perf
