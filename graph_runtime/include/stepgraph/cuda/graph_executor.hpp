#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stepgraph/cuda/foreign_work.hpp"
#include "stepgraph/executor.hpp"

namespace stepgraph {

/// A node of the plan as it was captured.
struct graph_node_info {
  std::string name;  ///< of the plan node
  node_kind kind = node_kind::update;
  std::string function;  ///< kernel symbol, mangled; empty for foreign work
  std::uint32_t blocks = 0;
  std::uint32_t threads = 0;
  bool programmatic = false;      ///< may start its prologue before the node before it has finished
  bool only_if_applied = false;   ///< foreign work in the body of a conditional node
  std::uint32_t graph_nodes = 0;  ///< that it became: 1, or what foreign work enqueued
};

/// How a plan becomes a graph.
struct graph_options {
  /// Steps that one launch runs one after the other, foreign work included, which is what renews
  /// the gradients between them. More than one makes the step the body of a loop on the device: the
  /// limits of conditional bodies hold for all foreign work (kernels, copies, memsets, child
  /// graphs), and kernels do not overlap their predecessors. Values set by hand reach the first
  /// step of the next launch; each step writes its record.
  std::uint32_t steps_per_launch = 1;
  /// Note the end of each launch by an event, for one more call to the driver: other streams are
  /// then ordered after it without waiting, and changes can be delivered beside a capture.
  bool record_launches = false;
};

/// Whether the driver has conditional graph nodes (CUDA 12.4): what `only_if_applied` and several
/// steps a launch need.
bool conditional_nodes_supported();

/// Runs a plan as an instantiated CUDA graph: one launch a step, whatever the number of tensors and
/// groups. Move-only owner of the graph, the executable and the device memory of the step.
class graph_executor final : public executor {
 public:
  /// Captures the plan node by node on a stream of its own (thread-local capture mode: other
  /// threads may use CUDA meanwhile), instantiates and uploads the graph, and copies the step's
  /// scalars and tables to the device of the plan's tensors, in the order of `stream`. No step
  /// runs. Refuses what `stream_executor` refuses but for only_if_applied.
  ///
  /// Foreign work is called meanwhile, on the capturing stream; what it throws passes on, after the
  /// capture has been ended and everything freed. Throws usage_error for callbacks that are not
  /// those of the plan, steps_per_launch of 0 and a driver without the conditional nodes that are
  /// asked for, and capture_error, with the name, for foreign work that does what cannot be
  /// captured.
  graph_executor(step_plan plan, cudaStream_t stream, foreign_work foreign = {},
                 graph_options options = {});
  /// Waits for the launches made so far, so that the tensors may be freed next. Not to be destroyed
  /// while a stream of the same thread is being captured.
  ~graph_executor() override;
  graph_executor(graph_executor&&) noexcept;
  graph_executor& operator=(graph_executor&&) noexcept;

  /// Launches one step, or steps_per_launch of them, onto `stream`, ordered after what was
  /// launched, enqueued or delivered before, on whatever streams. Never blocks, with one exception:
  /// operands re-bound since a launch on another stream make it wait for the device, unless
  /// `record_launches`. Refused on a stream that is being captured (capture_error): there,
  /// `enqueue`.
  void launch(cudaStream_t stream);

  /// Enqueues one step as kernels instead of the graph, exactly as `stream_executor::launch` does,
  /// also while `stream` is being captured: counters, values and bits are those of a launch.
  /// Foreign work is called in its place. After a launch on another stream it waits for the device,
  /// unless `record_launches`. Refused with usage_error if steps_per_launch is above 1 or if
  /// foreign work is only_if_applied.
  void enqueue(cudaStream_t stream);

  /// Enqueues the delivery of values set and operands re-bound since the last launch or delivery,
  /// ordered after that: replays of a captured step that are enqueued later see them. After a
  /// launch on another stream it waits for the device, unless `record_launches`. Refused on a
  /// stream that is being captured (capture_error), and while the ledger knows of a stale operand
  /// (usage_error).
  void deliver_async(cudaStream_t stream);

  /// Delivers on a stream of its own, ordered after what was launched, enqueued and delivered
  /// outside captures, and waits for it. Legal while streams of the calling thread are being
  /// captured: so a step that is enqueued into the capture next runs with what was set and re-bound
  /// until now. Refused after a launch without `record_launches` (capture_error).
  void deliver_beside_capture();

  /// Goes on with another plan: the launches after it run its step, those before it are not
  /// affected. If the report says `rebuilt`, graphs that captured a step before must not be
  /// replayed any more, which `recapture_required()` says until a step is captured again. Counters,
  /// samples and the loss scale go on; groups of the same name keep their progress and values set
  /// by hand, unless the new plan says otherwise of them than the plan before; other groups begin
  /// as the plan says. Tensors carry their own state, in the caller's memory; those that the new
  /// plan does not name may be freed.
  ///
  /// Takes the cheapest path that does it, and none dearer than `ceiling`. Up to `table_write`
  /// nothing waits: the next launch delivers the change, in its stream. Dearer paths wait for the
  /// launches made so far and upload the step's memory in the order of `stream`; the addresses of
  /// the loss scale and of the totals are others then. Operands are where the new plan says,
  /// whatever the ledger was told before.
  ///
  /// Throws update_error if a dearer path is needed, naming it, the ceiling and the reason;
  /// usage_error for what the constructor refuses; capture_error on a stream that is being
  /// captured. Then, and after any other error, plan, state and executable are as they were and the
  /// next launch runs them.
  ///
  /// Foreign work is captured again beyond `table_write`, with the callbacks of before or, where
  /// they are given, those of `foreign`, which take `graph_update` at least. Graphs that hold
  /// anything but the step's own kernels cannot be updated node by node.
  update_report update(step_plan next, update_path ceiling, cudaStream_t stream,
                       std::optional<foreign_work> foreign = {});

  /// Waits for the device.
  step_status status() override;

  /// One f32 in device memory: the loss scale that the next step expects in its gradients. A loss
  /// that is multiplied by it on the device, after the step before, needs no host read.
  const float* loss_scale_address() const;
  /// Device memory, one f64 for each norm group and one for the zeros: what foreign work after the
  /// node `grad_stats` of a plan with exchange_totals combines over devices.
  double* totals_address() const;

  /// Waits for the launches made so far and frees the graph and the device memory early; operands
  /// may be freed then. Every later call but this, `plan`, `ledger`, `read_records`,
  /// `recapture_required` and `instantiations` throws usage_error. Calling it again does nothing.
  void release();

  /// The plan's nodes as captured, in launch order.
  std::vector<graph_node_info> nodes() const;

  /// How often a graph was instantiated, the constructor's included; setters and re-binding never
  /// add.
  std::uint64_t instantiations() const noexcept;

 private:
  void check_memory(const void* data, const std::string& tensor,
                    operand_kind operand) const override;
  void check_inputs(const step_plan& plan) const override;
  device_location device() const override;
  void check_not_released() const;

  struct state;
  std::unique_ptr<state> state_;
  std::uint64_t instantiations_ = 0;  ///< once state_ is gone
};

}  // namespace stepgraph
