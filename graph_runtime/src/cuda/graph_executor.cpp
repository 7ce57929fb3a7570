#include "stepgraph/cuda/graph_executor.hpp"

#include "step_graph.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"
#include "trace.hpp"

namespace stepgraph {

struct graph_executor::state {
  foreign_work foreign;  ///< goes last, when no launch can need what it holds
  graph_options options;
  cuda::device_step step;
  cuda::step_graph graph;
  cuda::unique_graph_exec executable;
  cuda::settings_carrier carrier;
  std::uint64_t instantiations = 0;
  cudaStream_t last_stream = nullptr;
  bool launched = false;

  state(const step_plan& plan, const detail::step_tables& tables, cudaStream_t stream,
        foreign_work work, const graph_options& how)
      : foreign(std::move(work)),
        options(how),
        step(plan, tables, stream),
        graph(plan, step, foreign, options) {
    const cuda::device_guard guard(step.device());
    executable = graph.instantiate();
    ++instantiations;
    carrier = graph.carrier();
    STEPGRAPH_CUDA_CHECK(cudaGraphUpload(executable.get(), stream));
  }
};

graph_executor::graph_executor(step_plan plan, cudaStream_t stream, foreign_work foreign,
                               graph_options options)
    : executor(std::move(plan)),
      state_(std::make_unique<state>(this->plan(), tables(), stream, std::move(foreign), options)) {
  set_records(state_->step.take_record_ring());
}

graph_executor::~graph_executor() = default;
graph_executor::graph_executor(graph_executor&&) noexcept = default;
graph_executor& graph_executor::operator=(graph_executor&&) noexcept = default;

void graph_executor::check_memory(const void* data, const std::string& tensor,
                                  operand_kind operand) const {
  // After a release the change itself is refused.
  if (state_) cuda::check_device_memory(data, state_->step.device(), tensor, operand);
}

void graph_executor::launch(cudaStream_t stream) {
  if (!state_) throw usage_error("the executor was released");
  const cuda::trace_range range("stepgraph step");
  const cuda::device_guard guard(state_->step.device());
  if (cuda::is_capturing(stream)) {
    throw capture_error(
        "graph_executor cannot be launched on a stream that is being captured, "
        "expected a stream_executor there");
  }
  cuda::device_step::delivery delivery;
  if (pending().any()) {
    delivery = state_->step.take(pending(), stream, [&] {
      // The copy must not overtake a replay on another stream that still reads the tables.
      if (state_->launched && state_->last_stream != stream) {
        STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
      }
    });
  }
  try {
    if (delivery.settings.serial != 0) {
      state_->carrier.write(state_->executable.get(), delivery.settings);
    }
    STEPGRAPH_CUDA_CHECK(cudaGraphLaunch(state_->executable.get(), stream));
  } catch (const cuda_error&) {
    state_->step.not_delivered(pending());
    throw;
  }
  state_->step.delivered(delivery, stream);
  state_->last_stream = stream;
  state_->launched = true;
}

const float* graph_executor::loss_scale_address() const {
  if (!state_) throw usage_error("the executor was released");
  return &state_->step.block().scalars->next_loss_scale.scale;
}

double* graph_executor::totals_address() const {
  if (!state_) throw usage_error("the executor was released");
  return state_->step.totals();
}

step_status graph_executor::status() {
  if (!state_) throw usage_error("the executor was released");
  return state_->step.read_status();
}

void graph_executor::release() {
  if (!state_) return;
  const cuda::device_guard guard(state_->step.device());
  STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
  pending().close();
  state_.reset();
}

std::vector<graph_node_info> graph_executor::nodes() const {
  if (!state_) throw usage_error("the executor was released");
  return state_->graph.describe(plan());
}

std::uint64_t graph_executor::instantiations() const noexcept {
  return state_ ? state_->instantiations : 0;
}

}  // namespace stepgraph
