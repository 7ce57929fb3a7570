#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stepgraph/step_plan.hpp"

namespace stepgraph::cli {

/// A step that `stepgraph bench` measures.
struct bench_case {
  std::string list;  ///< its tensors, for people
  std::vector<std::uint64_t> numels;
  update_signature signature;
  bool whole_step = false;  ///< clipping and zeroing of the gradients too; else AdamW alone

  std::uint64_t memory_bytes() const;  ///< of its operands
};

/// What is measured where there is a GPU, or where there is none, smallest list first.
std::vector<bench_case> bench_cases(bool on_gpu);

/// `bytes` of memory, with contents that are numbers in every format.
using operand_allocator = std::function<void*(std::uint64_t bytes)>;

/// The plan of a case, on memory from the allocator.
step_plan plan_of(const bench_case& measured, device_location device,
                  const operand_allocator& allocate);

/// Medians in microseconds.
struct bench_times {
  std::uint64_t bytes = 0;          ///< that a step reads and writes, as its plan counts them
  double step_us = 0.0;             ///< of a step among others back to back
  std::optional<double> launch_us;  ///< until the call returned; on a GPU
};

/// Where steps are measured.
class bench_machine {
 public:
  virtual ~bench_machine() = default;

  virtual std::string executor() const = 0;  ///< "graph" or "host"
  virtual std::string device() const = 0;
  /// Memory that a case may take.
  virtual std::uint64_t memory_bytes() const = 0;
  /// Bytes read and written in a second, in units of 1e9, by a plain copy of `bytes`.
  virtual double copy_gb_s(std::uint64_t bytes, int repetitions) = 0;
  virtual bench_times run(const bench_case& measured, int repetitions) = 0;
};

std::unique_ptr<bench_machine> make_host_machine();
#if defined(STEPGRAPH_HAS_CUDA)
/// The current GPU; null, with the reason, where there is none.
std::unique_ptr<bench_machine> make_cuda_machine(std::string& why_not);
#endif

/// Of an unsorted list; 0 if it is empty.
double median_of(std::vector<double> values);

/// How many steps make a measurement of two milliseconds, at most 1,000.
int steps_worth_measuring(double step_us);

}  // namespace stepgraph::cli
