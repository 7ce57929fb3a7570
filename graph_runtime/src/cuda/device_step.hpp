#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "../pending_changes.hpp"
#include "../record_ring.hpp"
#include "../step_tables.hpp"
#include "launch_trail.hpp"
#include "pinned_pool.hpp"
#include "stepgraph/cuda/foreign_work.hpp"
#include "stepgraph/cuda/handles.hpp"
#include "stepgraph/executor.hpp"
#include "stepgraph/kernels/cuda_launch.hpp"

namespace stepgraph::cuda {

/// A plan on a device: the step block and the tables in device memory, and the way to enqueue each
/// node. Shared by the executors that differ only in how launches reach the device.
class device_step {
 public:
  /// Refuses tensors that are not memory of the plan's CUDA device. Enqueues the upload of the
  /// tables and of `image`, the step block, onto `stream`; the host memory it reads is free on
  /// return.
  device_step(const step_plan& plan, const detail::step_tables& tables,
              const detail::step_block_image& image, cudaStream_t stream);
  ~device_step();
  device_step(const device_step&) = delete;
  device_step& operator=(const device_step&) = delete;

  int device() const noexcept { return device_; }

  /// Enqueues plan node `node`, one of the step's own, onto `stream`; only settings_node() looks at
  /// `settings`.
  void enqueue(std::size_t node, const settings_batch& settings, launch_order order,
               cudaStream_t stream) const;
  /// How `node` follows the node before it, by the plan's edges.
  launch_order order_of(std::size_t node) const noexcept { return orders_[node]; }

  /// What foreign work gets that belongs onto `stream`.
  foreign_context context_on(cudaStream_t stream) const noexcept;

  /// Changes on their way to a launch.
  struct delivery {
    settings_batch settings;  ///< serial 0 if there are none
    pinned_pool::buffer* settings_buffer = nullptr;
  };

  /// Takes what is pending: tables are copied to the device in the order of `stream`, settings into
  /// pinned memory for the launch to read. `before_copy` is called before a copy is enqueued.
  template <class BeforeCopy>
  delivery take(detail::pending_changes& pending, cudaStream_t stream, BeforeCopy&& before_copy) {
    pending.take(taken_, [&](const detail::changed_parts& changed) {
      before_copy();
      if (changed.tensors) copy_tensors(stream);
      if (changed.options) copy_options(stream);
    });
    try {
      return pack_settings();
    } catch (...) {
      not_delivered(pending);
      throw;
    }
  }

  /// The launch that reads the delivery has been enqueued onto `stream`.
  void delivered(const delivery& sent, cudaStream_t stream);

  /// The launch failed: settings that were taken and not delivered become pending again.
  void not_delivered(detail::pending_changes& pending);

  /// Serial number of the settings taken last, 0 before the first.
  std::uint64_t latest_serial() const noexcept { return serial_; }

  /// What was enqueued so far outside captures, the upload first.
  launch_trail& trail() noexcept { return trail_; }
  /// A stream of the step's own, for what must not become part of a capture; made at first use.
  cudaStream_t side_stream();

  /// Reads the step block back; waits for the device.
  detail::step_block_image read_block() const;
  step_status read_status() const;

  const step_block_view& block() const noexcept { return block_; }
  /// The totals that foreign work combines over devices: see step_options::exchange_totals.
  double* totals() const noexcept { return totals_; }
  /// The steps that a launch of several still has to run, in device memory.
  std::uint32_t* steps_left() const noexcept { return steps_left_; }
  /// The node that carries settings: the one that advances the step.
  std::size_t settings_node() const noexcept { return settings_node_; }
  /// The ring that the step writes, for the executor to keep; null if there is none.
  std::unique_ptr<detail::record_ring> take_record_ring() { return std::move(records_); }

 private:
  void make_record_ring(std::uint64_t launches);
  void copy_tensors(cudaStream_t stream);
  /// The plan's options that no setting can change; values set by hand stay.
  void copy_options(cudaStream_t stream);
  delivery pack_settings();

  const step_plan& plan_;
  const detail::step_tables& tables_;
  int device_;
  unique_device_memory memory_;  ///< everything below, in one allocation
  step_block_view block_;
  tensor_descriptor* tensors_ = nullptr;
  chunk_descriptor* chunks_ = nullptr;
  chunk_descriptor* statistics_chunks_ = nullptr;
  std::uint32_t* norm_group_ends_ = nullptr;
  std::uint32_t* tensor_arrivals_ = nullptr;
  double* totals_ = nullptr;
  block_message* messages_ = nullptr;
  std::uint32_t* steps_left_ = nullptr;
  std::unique_ptr<detail::record_ring> records_;
  launch_trail trail_;
  unique_stream side_stream_;
  pinned_pool pool_;
  std::vector<setting> taken_;  ///< and not delivered yet
  std::uint64_t serial_ = 0;
  std::size_t settings_node_ = 0;
  std::vector<launch_order> orders_;  ///< of each node
};

/// Throws usage_error unless `data` is memory of `device`.
void check_device_memory(const void* data, int device, const std::string& tensor,
                         operand_kind operand);

/// Throws usage_error unless kernels of `device` can read the inputs that the plan names.
void check_device_inputs(const step_plan& plan, int device);

}  // namespace stepgraph::cuda
