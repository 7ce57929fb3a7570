#include "bindings.hpp"

// stepgraph._core: the plan, the executors and what Python needs to find out fast. Knows nothing of
// torch at compile time: tensors arrive as addresses, so that one module serves every version.
NB_MODULE(_core, module) {
  // What a program still holds when it ends is no leak of this module, and the message would reach
  // those who run the program.
  nanobind::set_leak_warnings(false);
  using namespace stepgraph::python;
  module.doc() = "The optimizer step of stepgraph: plans, executors, schedules.";
  module.attr("__version__") = STEPGRAPH_VERSION;
#if defined(STEPGRAPH_HAS_CUDA)
  module.attr("HAS_CUDA") = true;
#else
  module.attr("HAS_CUDA") = false;
#endif
  bind_errors(module);
  bind_schedules(module);
  bind_loss_scaling(module);
  bind_plan(module);
  bind_records(module);
  bind_executors(module);
  bind_cuda_executors(module);
  bind_tensor_watch(module);
  bind_block_scaled(module);
}
