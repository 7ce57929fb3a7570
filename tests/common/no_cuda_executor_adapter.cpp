// Stands in for cuda_executor_adapter.cpp in builds without CUDA.
#include <stdexcept>

#include "common/cuda_executor_adapter.hpp"

namespace stepgraph::test {

std::string missing_gpu() { return "built without CUDA"; }

std::unique_ptr<executor_adapter> make_cuda_adapter(executor_kind, const test_problem&) {
  throw std::invalid_argument(missing_gpu());
}

}  // namespace stepgraph::test
