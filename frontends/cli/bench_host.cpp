#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "bench_cases.hpp"
#include "stepgraph/host_executor.hpp"

namespace stepgraph::cli {
namespace {

using memory_block = std::unique_ptr<std::byte[]>;

/// Every format reads these bytes as a number near 0.01 or 1.
memory_block filled_block(std::uint64_t bytes) {
  memory_block block(new std::byte[bytes]);
  std::memset(block.get(), 0x3c, bytes);
  return block;
}

/// As many as the host executor uses.
unsigned thread_count() {
  if (const char* asked = std::getenv("OMP_NUM_THREADS")) {
    return static_cast<unsigned>(std::max(1, std::atoi(asked)));
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

template <class Work>
double seconds_of(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// memcpy by all threads at once, each a part.
void copy_by_all_threads(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  const unsigned threads = thread_count();
  const std::uint64_t part = bytes / threads;
  std::vector<std::jthread> others;
  for (unsigned i = 1; i < threads; ++i) {
    others.emplace_back([=] { std::memcpy(to + i * part, from + i * part, part); });
  }
  std::memcpy(to, from, part);
}

class host_machine final : public bench_machine {
 public:
  std::string executor() const override { return "host"; }
  std::string device() const override { return "cpu"; }

  std::uint64_t memory_bytes() const override {
    const auto pages = static_cast<std::uint64_t>(std::max(0L, sysconf(_SC_AVPHYS_PAGES)));
    return pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) / 2;
  }

  double copy_gb_s(std::uint64_t bytes, int repetitions) override {
    const memory_block from = filled_block(bytes);
    const memory_block to = filled_block(bytes);
    double best = 0.0;
    for (int i = 0; i < repetitions; ++i) {
      const double seconds = seconds_of([&] { copy_by_all_threads(to.get(), from.get(), bytes); });
      best = std::max(best, 2.0 * static_cast<double>(bytes) / seconds * 1e-9);
    }
    return best;
  }

  bench_times run(const bench_case& measured, int repetitions) override {
    std::vector<memory_block> blocks;
    const operand_allocator allocate = [&](std::uint64_t bytes) {
      blocks.push_back(filled_block(bytes));
      return static_cast<void*>(blocks.back().get());
    };
    host_executor step(plan_of(measured, {}, allocate));
    step.launch();
    const int steps = steps_worth_measuring(1e6 * seconds_of([&] { step.launch(); }));
    std::vector<double> times;
    for (int i = 0; i < repetitions; ++i) {
      const double seconds = seconds_of([&] {
        for (int n = 0; n < steps; ++n) step.launch();
      });
      times.push_back(1e6 * seconds / steps);
    }
    return {.bytes = step.plan().bytes_read() + step.plan().bytes_written(),
            .step_us = median_of(std::move(times)),
            .launch_us = {}};
  }
};

}  // namespace

std::unique_ptr<bench_machine> make_host_machine() { return std::make_unique<host_machine>(); }

}  // namespace stepgraph::cli
