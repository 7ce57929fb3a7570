#pragma once

#include <memory>
#include <string>

#include "common/executor_adapter.hpp"

namespace stepgraph::test {

/// Why CUDA executors cannot run here; empty if they can.
std::string missing_gpu();

/// As make_adapter, for the kinds that need a GPU.
std::unique_ptr<executor_adapter> make_cuda_adapter(executor_kind kind,
                                                    const test_problem& problem);

}  // namespace stepgraph::test
