#include "stepgraph/cuda/stream_executor.hpp"

#include <fmt/format.h>

#include "../foreign_callbacks.hpp"
#include "../plan_update.hpp"
#include "device_step.hpp"
#include "foreign_call.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"
#include "trace.hpp"

namespace stepgraph {

namespace {

/// The callbacks of a plan that needs no branch on the device.
std::vector<cuda::foreign_callback> callbacks_of(const step_plan& plan,
                                                 const foreign_work& foreign) {
  for (const plan_node& node : plan.nodes) {
    if (!node.only_if_applied) continue;
    throw usage_error(
        fmt::format("foreign work '{}': a stream_executor does not know on the host whether the "
                    "step is applied; only_if_applied takes a graph_executor",
                    node.name));
  }
  return detail::callbacks_by_node(plan, foreign);
}

}  // namespace

stream_executor::stream_executor(step_plan plan, cudaStream_t stream, foreign_work foreign)
    : executor(std::move(plan)),
      foreign_(callbacks_of(this->plan(), foreign)),
      step_(std::make_unique<cuda::device_step>(this->plan(), tables(),
                                                detail::step_block_image(this->plan()), stream)) {
  set_records(step_->take_record_ring());
}

stream_executor::~stream_executor() = default;
stream_executor::stream_executor(stream_executor&&) noexcept = default;
stream_executor& stream_executor::operator=(stream_executor&& other) noexcept {
  executor::operator=(std::move(other));
  step_ = std::move(other.step_);  // waits for the device before the callbacks go
  foreign_ = std::move(other.foreign_);
  captured_ = other.captured_;
  return *this;
}

void stream_executor::check_memory(const void* data, const std::string& tensor,
                                   operand_kind operand) const {
  cuda::check_device_memory(data, step_->device(), tensor, operand);
}

void stream_executor::check_inputs(const step_plan& plan) const {
  cuda::check_device_inputs(plan, step_->device());
}

device_location stream_executor::device() const { return {device_kind::cuda, step_->device()}; }

update_report stream_executor::update(step_plan next, cudaStream_t stream,
                                      std::optional<foreign_work> foreign) {
  const cuda::device_guard guard(step_->device());
  if (cuda::is_capturing(stream)) {
    throw capture_error("an executor cannot be updated on a stream that is being captured");
  }
  const auto update = prepare_update(std::move(next));
  std::vector<cuda::foreign_callback> callbacks =
      callbacks_of(*update->plan, foreign ? *foreign : detail::callbacks_by_name(plan(), foreign_));
  if (foreign) {
    detail::require_path(*update, update_path::graph_update, "the callbacks are given anew");
  }
  if (update->need.path <= update_path::table_write) return commit_in_place(*update);

  auto fresh = std::make_unique<cuda::device_step>(
      *update->plan, *update->tables,
      detail::continued(step_->read_block(), plan(), *update->plan, update->need), stream);
  // Launches are not bound to `stream`.
  STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream));
  drain_records();
  auto records = fresh->take_record_ring();
  update->report.path = update_path::table_write;
  update->report.rebuilt = true;
  update->report.counts.tables_written = 1;  // all of them, with the block
  if (captured_) {
    set_invalid_captures(
        "an update rebuilt the step: graphs that captured a launch before must not be replayed");
  }
  captured_ = false;
  return commit_rebuilt(*update, &records, [&] {
    fresh.swap(step_);
    callbacks.swap(foreign_);
  });
}

void stream_executor::launch(cudaStream_t stream) {
  check_ledger();
  const cuda::trace_range range("stepgraph step");
  const cuda::device_guard guard(step_->device());
  const bool capturing = cuda::is_capturing(stream);
  if (capturing && !captured_) {
    captured_ = true;
    set_invalid_captures({});
  }
  cuda::device_step::delivery delivery;
  if (!capturing && pending().any()) {
    delivery = step_->take(pending(), stream, [] {});
  }
  for (std::size_t node = 0; node < plan().nodes.size(); ++node) {
    try {
      if (foreign_[node]) {
        cuda::call_foreign_work(plan().nodes[node], foreign_[node], step_->context_on(stream));
      } else {
        step_->enqueue(node, delivery.settings, step_->order_of(node), stream);
      }
    } catch (...) {
      // Nothing that would have read the settings was enqueued.
      if (node <= step_->settings_node()) step_->not_delivered(pending());
      throw;
    }
    if (node == step_->settings_node()) step_->delivered(delivery, stream);
  }
}

void stream_executor::deliver_async(cudaStream_t stream) {
  check_ledger();
  const cuda::device_guard guard(step_->device());
  if (cuda::is_capturing(stream)) {
    throw capture_error(
        "values cannot be delivered on a stream that is being captured: every "
        "replay would repeat them");
  }
  if (!pending().any()) return;
  const cuda::device_step::delivery delivery = step_->take(pending(), stream, [] {});
  if (delivery.settings.serial == 0) return;
  const cudaError_t status = cuda::launch_apply_settings(step_->block(), delivery.settings, stream);
  if (status != cudaSuccess) step_->not_delivered(pending());
  STEPGRAPH_CUDA_CHECK(status);
  step_->delivered(delivery, stream);
}

const float* stream_executor::loss_scale_address() const noexcept {
  return &step_->block().scalars->next_loss_scale.scale;
}

double* stream_executor::totals_address() const noexcept { return step_->totals(); }

step_status stream_executor::status() { return step_->read_status(); }

}  // namespace stepgraph
