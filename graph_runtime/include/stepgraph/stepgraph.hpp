#pragma once

/// Everything that needs no CUDA toolkit; with it, also the CUDA executors.
#include "stepgraph/address_ledger.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/executor.hpp"
#include "stepgraph/host_executor.hpp"
#include "stepgraph/megatron_schedules.hpp"
#include "stepgraph/schedule.hpp"
#include "stepgraph/step_builder.hpp"
#include "stepgraph/step_plan.hpp"
#include "stepgraph/tensor_view.hpp"
#include "stepgraph/torch_schedules.hpp"
#include "stepgraph/update_report.hpp"

#if defined(STEPGRAPH_HAS_CUDA)
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#endif
