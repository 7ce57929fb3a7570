#include "step_runner.hpp"
#include "stepgraph/host_executor.hpp"

namespace stepgraph::libtorch::detail {
namespace {

class host_runner final : public step_runner {
 public:
  explicit host_runner(step_plan plan) : executor_(std::move(plan)) {}

  executor& core() noexcept override { return executor_; }

  bool launch(bool) override {
    executor_.launch();
    return true;
  }

 private:
  host_executor executor_;
};

}  // namespace

std::unique_ptr<step_runner> make_host_runner(step_plan plan) {
  return std::make_unique<host_runner>(std::move(plan));
}

}  // namespace stepgraph::libtorch::detail
