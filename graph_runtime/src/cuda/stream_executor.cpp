#include "stepgraph/cuda/stream_executor.hpp"

#include "../foreign_callbacks.hpp"
#include "../plan_update.hpp"
#include "device_step.hpp"
#include "kernel_steps.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"
#include "trace.hpp"

namespace stepgraph {

stream_executor::stream_executor(step_plan plan, cudaStream_t stream, foreign_work foreign)
    : executor(std::move(plan)),
      foreign_(cuda::callbacks_on_streams(this->plan(), foreign)),
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
  std::vector<cuda::foreign_callback> callbacks = cuda::callbacks_on_streams(
      *update->plan, foreign ? *foreign : detail::callbacks_by_name(plan(), foreign_));
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
  if (capturing) note_capture();
  cuda::enqueue_step(*step_, plan(), foreign_, pending(), stream, capturing);
}

void stream_executor::deliver_async(cudaStream_t stream) {
  check_ledger();
  const cuda::device_guard guard(step_->device());
  cuda::deliver(*step_, pending(), stream);
}

void stream_executor::deliver_beside_capture() {
  check_ledger();
  const cuda::device_guard guard(step_->device());
  cuda::deliver_beside_capture(*step_, pending());
}

const float* stream_executor::loss_scale_address() const noexcept {
  return &step_->block().scalars->next_loss_scale.scale;
}

double* stream_executor::totals_address() const noexcept { return step_->totals(); }

step_status stream_executor::status() { return step_->read_status(); }

}  // namespace stepgraph
