#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "bindings.hpp"
#include "executor_binding.hpp"
#include "names.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace stepgraph::python {
namespace {

cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

foreign_work device_callbacks(const callback_list& callbacks) {
  foreign_work work;
  for (const auto& callback : callbacks) {
    work[callback->name()] = [callback](const foreign_context& context) {
      (*callback)(reinterpret_cast<std::uintptr_t>(context.stream),
                  reinterpret_cast<std::uintptr_t>(context.totals),
                  reinterpret_cast<std::uintptr_t>(context.loss_scale));
    };
  }
  return work;
}

std::optional<foreign_work> new_callbacks(const nb::object& foreign, const callback_list& given) {
  if (foreign.is_none()) return std::nullopt;
  return device_callbacks(given);
}

class stream_binding final : public executor_binding {
 public:
  stream_binding(const step_plan& plan, std::uintptr_t stream, callback_list given)
      : executor_binding(std::move(given)) {
    const nb::gil_scoped_release gil;
    executor_ =
        std::make_unique<stream_executor>(plan, stream_of(stream), device_callbacks(callbacks()));
  }

  stream_executor& core() override {
    if (!executor_) throw usage_error("the executor was released");
    return *executor_;
  }
  void release() override {
    std::unique_ptr<stream_executor> gone;
    // Setters look at the executor under the GIL alone.
    const nb::gil_scoped_acquire gil;
    gone.swap(executor_);
    const nb::gil_scoped_release waiting;
    gone.reset();
  }
  const void* loss_scale_address() override { return core().loss_scale_address(); }
  const void* totals_address() override { return core().totals_address(); }

 private:
  std::unique_ptr<stream_executor> executor_;
};

class graph_binding final : public executor_binding {
 public:
  graph_binding(const step_plan& plan, std::uintptr_t stream, callback_list given,
                std::uint32_t steps_per_launch)
      : executor_binding(std::move(given)) {
    const nb::gil_scoped_release gil;
    executor_.emplace(plan, stream_of(stream), device_callbacks(callbacks()),
                      // Frameworks change streams and capture at any time.
                      graph_options{.steps_per_launch = steps_per_launch, .record_launches = true});
  }

  graph_executor& core() override { return *executor_; }
  void release() override { executor_->release(); }
  const void* loss_scale_address() override { return core().loss_scale_address(); }
  const void* totals_address() override { return core().totals_address(); }

 private:
  std::optional<graph_executor> executor_;
};

nb::list captured_nodes(graph_binding& self) {
  nb::list nodes;
  for (const graph_node_info& node : self.core().nodes()) {
    nb::dict described;
    described["name"] = node.name;
    described["kind"] = to_name(node.kind);
    described["function"] = node.function;
    described["blocks"] = node.blocks;
    described["threads"] = node.threads;
    described["programmatic"] = node.programmatic;
    described["only_if_applied"] = node.only_if_applied;
    described["graph_nodes"] = node.graph_nodes;
    nodes.append(described);
  }
  return nodes;
}

/// What both have beside launches.
template <class Binding>
void bind_deliveries(nb::class_<Binding, executor_binding>& type) {
  type.def(
          "deliver",
          [](Binding& self, std::uintptr_t stream) {
            self.exclusively([&] { self.core().deliver_async(stream_of(stream)); });
          },
          "stream"_a,
          "Enqueues what was set since the last launch, for replays of a captured step.")
      .def(
          "deliver_beside_capture",
          [](Binding& self) { self.exclusively([&] { self.core().deliver_beside_capture(); }); },
          "The same on a stream of its own, and waits for it; legal while the caller captures.");
}

void bind_stream_executor(nb::module_& module) {
  nb::class_<stream_binding, executor_binding> type(
      module, "StreamExecutor", nb::type_slots(executor_slots),
      "Runs a plan as kernels on the caller's streams, also while they are being captured. Streams "
      "are handles as integers (torch.cuda.Stream.cuda_stream).");
  bind_deliveries(type);
  type.def(
          "__init__",
          [](stream_binding* self, const step_plan& plan, std::uintptr_t stream,
             const nb::object& foreign) {
            new (self) stream_binding(plan, stream, callbacks_from(foreign));
          },
          "plan"_a, "stream"_a, "foreign"_a = nb::none(),
          "`foreign`: for each foreign node of the plan a callable of the stream, the address of "
          "the totals and that of the loss scale.")
      .def(
          "launch",
          [](stream_binding& self, std::uintptr_t stream) {
            self.exclusively([&] { self.core().launch(stream_of(stream)); });
          },
          "stream"_a, "Enqueues one step, ordered after the launch before. Releases the GIL.")
      .def(
          "update",
          [](stream_binding& self, const step_plan& plan, std::uintptr_t stream,
             const nb::object& foreign) {
            callback_list given = callbacks_from(foreign);
            update_report report = self.exclusively([&] {
              return self.core().update(plan, stream_of(stream), new_callbacks(foreign, given));
            });
            if (!foreign.is_none()) self.callbacks().swap(given);
            return report;
          },
          "plan"_a, "stream"_a, "foreign"_a = nb::none(), "Goes on with another plan.");
}

void bind_graph_executor(nb::module_& module) {
  nb::class_<graph_binding, executor_binding> type(
      module, "GraphExecutor", nb::type_slots(executor_slots),
      "Runs a plan as one launch of an instantiated CUDA graph. Streams are handles as integers "
      "(torch.cuda.Stream.cuda_stream).");
  bind_deliveries(type);
  type.def(
          "__init__",
          [](graph_binding* self, const step_plan& plan, std::uintptr_t stream,
             const nb::object& foreign, std::uint32_t steps_per_launch) {
            new (self) graph_binding(plan, stream, callbacks_from(foreign), steps_per_launch);
          },
          "plan"_a, "stream"_a, "foreign"_a = nb::none(), "steps_per_launch"_a = 1,
          "`foreign`: for each foreign node of the plan a callable of the stream, the address of "
          "the totals and that of the loss scale, called while the graph is captured and at every "
          "enqueue().")
      .def(
          "launch",
          [](graph_binding& self, std::uintptr_t stream) {
            self.exclusively([&] { self.core().launch(stream_of(stream)); });
          },
          "stream"_a, "Replays the step, ordered after what came before. Releases the GIL.")
      .def(
          "enqueue",
          [](graph_binding& self, std::uintptr_t stream) {
            self.exclusively([&] { self.core().enqueue(stream_of(stream)); });
          },
          "stream"_a,
          "Enqueues the kernels of one step instead of the graph, also into a capture of the "
          "caller's.")
      .def(
          "update",
          [](graph_binding& self, const step_plan& plan, std::uintptr_t stream,
             const std::string& ceiling, const nb::object& foreign) {
            const update_path dearest = from_name<update_path>(ceiling);
            callback_list given = callbacks_from(foreign);
            update_report report = self.exclusively([&] {
              return self.core().update(plan, dearest, stream_of(stream),
                                        new_callbacks(foreign, given));
            });
            if (!foreign.is_none()) self.callbacks().swap(given);
            return report;
          },
          "plan"_a, "stream"_a, "ceiling"_a = "instantiate", "foreign"_a = nb::none(),
          "Goes on with another plan, by the cheapest path and none dearer than `ceiling`.")
      .def("nodes", &captured_nodes, "The plan's nodes as captured, in launch order.")
      .def_prop_ro(
          "instantiations", [](graph_binding& self) { return self.core().instantiations(); },
          "How often a graph was instantiated, the constructor's included.");
}

}  // namespace

void bind_cuda_executors(nb::module_& module) {
  bind_stream_executor(module);
  bind_graph_executor(module);
}

}  // namespace stepgraph::python
