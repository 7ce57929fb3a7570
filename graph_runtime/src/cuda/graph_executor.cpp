#include "stepgraph/cuda/graph_executor.hpp"

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <optional>

#include "../plan_update.hpp"
#include "kernel_steps.hpp"
#include "step_executable.hpp"
#include "step_graph.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"
#include "trace.hpp"

namespace stepgraph {

struct graph_executor::state {
  foreign_work foreign;  ///< goes last, when no launch can need what it holds
  std::vector<cuda::foreign_callback> foreign_on_streams;  ///< of each node, once enqueued
  graph_options options;
  cuda::device_step step;
  std::shared_ptr<const cuda::step_graph> graph;
  cuda::settings_carrier carrier;  ///< of the graph, until it becomes an executable
  std::optional<cuda::step_executable> executable;
  std::uint64_t serial_written = 0;  ///< of the settings in the executable

  /// Captured, not instantiated.
  state(const step_plan& plan, const detail::step_tables& tables,
        const detail::step_block_image& image, cudaStream_t stream, foreign_work work,
        const graph_options& how)
      : foreign(std::move(work)),
        options(how),
        step(plan, tables, image, stream),
        graph(std::make_shared<const cuda::step_graph>(plan, step, foreign, options)),
        carrier(graph->carrier()) {}
};

graph_executor::graph_executor(step_plan plan, cudaStream_t stream, foreign_work foreign,
                               graph_options options)
    : executor(std::move(plan)),
      state_(std::make_unique<state>(this->plan(), tables(), detail::step_block_image(this->plan()),
                                     stream, std::move(foreign), options)) {
  const cuda::device_guard guard(state_->step.device());
  state_->executable.emplace(state_->graph, state_->carrier, stream);
  set_records(state_->step.take_record_ring());
}

graph_executor::~graph_executor() = default;
graph_executor::graph_executor(graph_executor&&) noexcept = default;
graph_executor& graph_executor::operator=(graph_executor&&) noexcept = default;

void graph_executor::check_memory(const void* data, const std::string& tensor,
                                  operand_kind operand) const {
  cuda::check_device_memory(data, state_->step.device(), tensor, operand);
}

void graph_executor::check_inputs(const step_plan& plan) const {
  cuda::check_device_inputs(plan, state_->step.device());
}

device_location graph_executor::device() const {
  return {device_kind::cuda, state_->step.device()};
}

void graph_executor::check_not_released() const {
  if (!state_) throw usage_error("the executor was released");
}

update_report graph_executor::update(step_plan next, update_path ceiling, cudaStream_t stream,
                                     std::optional<foreign_work> foreign) {
  check_not_released();
  const cuda::trace_range range("stepgraph update");
  const cuda::device_guard guard(state_->step.device());
  if (cuda::is_capturing(stream)) {
    throw capture_error("an executor cannot be updated on a stream that is being captured");
  }
  const auto update = prepare_update(std::move(next));
  if (foreign) {
    detail::require_path(*update, update_path::graph_update, "the callbacks are given anew");
  }
  check_ceiling(*update, ceiling);
  if (update->need.path <= update_path::table_write) return commit_in_place(*update);

  // The new step stands completely before anything of the old one is touched.
  auto fresh = std::make_unique<state>(
      *update->plan, *update->tables,
      detail::continued(state_->step.read_block(), plan(), *update->plan, update->need), stream,
      foreign ? std::move(*foreign) : state_->foreign, state_->options);
  // Launches are not bound to `stream`.
  STEPGRAPH_CUDA_CHECK(cudaStreamSynchronize(stream));
  drain_records();
  auto records = fresh->step.take_record_ring();
  update->report.rebuilt = true;
  update->report.counts.tables_written = 1;  // all of them, with the block
  const std::function<void()> swap = [&] {
    fresh->executable.swap(state_->executable);
    fresh.swap(state_);
  };
  try {
    state_->executable->follow(fresh->graph, fresh->carrier, *update->plan, update->need.path,
                               ceiling, update->report);
  } catch (const update_error& refusal) {
    note_refusal(refusal.what());
    throw;
  }
  return commit_rebuilt(*update, &records, swap);
}

void graph_executor::launch(cudaStream_t stream) {
  check_not_released();
  check_ledger();
  const cuda::trace_range range("stepgraph step");
  const cuda::device_guard guard(state_->step.device());
  if (cuda::is_capturing(stream)) {
    throw capture_error(
        "graph_executor cannot be launched on a stream that is being captured, "
        "expected enqueue there");
  }
  cuda::launch_trail& trail = state_->step.trail();
  trail.follow_by_replay(stream);
  cuda::device_step::delivery delivery;
  try {
    if (pending().any()) {
      // The copy must not overtake a replay on another stream that still reads the tables.
      delivery = state_->step.take(pending(), stream, [&] { trail.follow(stream); });
    }
    // The executable holds the settings of its latest launch, which the step has applied, unless
    // kernels have brought others since: then it must not repeat its own.
    if (state_->serial_written != state_->step.latest_serial()) {
      state_->executable->write(delivery.settings);
      state_->serial_written = state_->step.latest_serial();
    }
    state_->executable->launch(stream);
  } catch (const error&) {
    state_->step.not_delivered(pending());
    trail.add_unknown(stream);  // the copy, if there was one
    throw;
  }
  trail.add_replay(stream);
  state_->step.delivered(delivery, stream);
  if (state_->options.record_launches) trail.record(stream);
}

void graph_executor::enqueue(cudaStream_t stream) {
  check_not_released();
  check_ledger();
  if (const std::uint32_t steps = state_->options.steps_per_launch; steps != 1) {
    throw usage_error(
        fmt::format("the executor runs {} steps a launch, in a loop on the device, and cannot "
                    "enqueue them as kernels: expected steps_per_launch 1",
                    steps));
  }
  const cuda::trace_range range("stepgraph step");
  const cuda::device_guard guard(state_->step.device());
  if (state_->foreign_on_streams.empty()) {
    state_->foreign_on_streams = cuda::callbacks_on_streams(plan(), state_->foreign);
  }
  const bool capturing = cuda::is_capturing(stream);
  if (capturing) note_capture();
  cuda::enqueue_step(state_->step, plan(), state_->foreign_on_streams, pending(), stream,
                     capturing);
}

void graph_executor::deliver_async(cudaStream_t stream) {
  check_not_released();
  check_ledger();
  const cuda::device_guard guard(state_->step.device());
  cuda::deliver(state_->step, pending(), stream);
}

void graph_executor::deliver_beside_capture() {
  check_not_released();
  check_ledger();
  const cuda::device_guard guard(state_->step.device());
  cuda::deliver_beside_capture(state_->step, pending());
}

const float* graph_executor::loss_scale_address() const {
  check_not_released();
  return &state_->step.block().scalars->next_loss_scale.scale;
}

double* graph_executor::totals_address() const {
  check_not_released();
  return state_->step.totals();
}

step_status graph_executor::status() {
  check_not_released();
  return state_->step.read_status();
}

void graph_executor::release() {
  if (!state_) return;
  const cuda::device_guard guard(state_->step.device());
  STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
  drain_records();
  instantiations_ = state_->executable->instantiations();
  std::unique_ptr<state> gone;
  close([&] { gone.swap(state_); });
}

std::vector<graph_node_info> graph_executor::nodes() const {
  check_not_released();
  return state_->graph->describe(plan());
}

std::uint64_t graph_executor::instantiations() const noexcept {
  return state_ ? state_->executable->instantiations() : instantiations_;
}

}  // namespace stepgraph
