#include <fmt/format.h>

#include "step_runner.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/host_executor.hpp"

namespace stepgraph::libtorch::detail {
namespace {

class host_runner final : public step_runner {
 public:
  explicit host_runner(step_plan plan) : executor_(std::move(plan)) {}

  executor& core() noexcept override { return executor_; }
  const float* loss_scale_address() const override { return executor_.loss_scale_address(); }

  bool launch(bool) override {
    executor_.launch();
    return true;
  }

 private:
  host_executor executor_;
};

}  // namespace

void step_runner::check_not_capturing(const char* caller) const {
  if (!capturing()) return;
  throw usage_error(fmt::format(
      "{}: the current stream is being captured, expected a call before or after the capture",
      caller));
}

std::shared_ptr<step_runner> make_host_runner(step_plan plan) {
  return std::make_shared<host_runner>(std::move(plan));
}

}  // namespace stepgraph::libtorch::detail
