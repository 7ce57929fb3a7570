#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/ones_on_device.hpp"
#include "stepgraph/cuda/foreign_work.hpp"
#include "stepgraph/cuda/handles.hpp"

/// Work for foreign nodes of tests.
namespace stepgraph::test {

/// The most entries of a device_log.
inline constexpr std::uint32_t log_capacity = 1024;

/// Appends `entry` to the log: its length, then its entries.
void append_async(std::uint32_t* log, std::uint32_t entry, cudaStream_t stream);

/// Stores `value` into all elements, slowly: the first element arrives last, about `microseconds`
/// after the others.
void fill_slowly_async(float* data, std::uint64_t numel, float value, unsigned microseconds,
                       cudaStream_t stream);

/// Adds `value` to every element.
void add_async(float* data, std::uint64_t numel, float value, cudaStream_t stream);

/// Remembers in device memory who ran, in which order.
class device_log {
 public:
  device_log() : memory_(std::vector<std::uint32_t>(log_capacity + 1, 0u)) {}

  /// Foreign work that appends `entry`.
  auto entry(std::uint32_t value) const {
    return [memory = memory_.data(), value](cudaStream_t stream) {
      append_async(memory, value, stream);
    };
  }
  void append(std::uint32_t value, cudaStream_t stream) const {
    append_async(memory_.data(), value, stream);
  }
  /// Waits for the device.
  std::vector<std::uint32_t> read() const {
    const std::vector<std::uint32_t> all = memory_.read();
    return {all.begin() + 1, all.begin() + 1 + std::min(all[0], log_capacity)};
  }

 private:
  device_buffer<std::uint32_t> memory_;
};

inline constexpr const char* f32_update = "update/f32/f32/none/f32/f32";

/// A plan of one tensor with foreign work.
inline step_plan plan_with(const ones_on_device& tensor, const std::vector<foreign_node>& works,
                           const step_options& options = {.skip_non_finite = true},
                           const group_options& group = {.learning_rate = 0.1}) {
  step_builder builder;
  builder.set_options(options);
  builder.add_tensor(builder.add_group(group), tensor.operands("weight"));
  for (const foreign_node& work : works) builder.add_foreign_work(work);
  return builder.build();
}

/// Free memory of the current device, after everything has finished.
inline std::int64_t free_device_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaDeviceSynchronize());
  check(cudaMemGetInfo(&free, &total));
  return static_cast<std::int64_t>(free);
}

}  // namespace stepgraph::test
