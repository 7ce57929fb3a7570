#include "stepgraph/host_executor.hpp"

#include <fmt/format.h>

#include "pending_changes.hpp"
#include "step_tables.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph {

/// The step block in host memory.
struct host_executor::state {
  detail::step_block_image image;
  std::vector<math::adam_terms> terms;
  std::vector<setting> settings;  ///< of the launch in progress
  std::uint64_t serial = 0;       ///< of the latest batch of settings

  explicit state(const step_plan& plan) : image(plan), terms(plan.groups.size()) {}

  step_block_view view() {
    return {&image.scalars,        &image.step,  image.groups.data(),
            image.progress.data(), terms.data(), static_cast<std::uint32_t>(terms.size())};
  }
};

host_executor::host_executor(step_plan plan) : executor(std::move(plan)) {
  const step_plan& checked = this->plan();
  if (checked.device.kind != device_kind::host) {
    throw usage_error(fmt::format("the plan's tensors are on {}, expected host for host_executor",
                                  name_of(checked.device)));
  }
  state_ = std::make_unique<state>(checked);
}

host_executor::~host_executor() = default;
host_executor::host_executor(host_executor&&) noexcept = default;
host_executor& host_executor::operator=(host_executor&&) noexcept = default;

void host_executor::check_memory(const void*, const std::string&, operand_kind) const {}

void host_executor::launch() {
  settings_batch batch;
  if (pending().any()) {
    pending().take(state_->settings, [] {});
    batch = {state_->settings.data(), static_cast<std::uint32_t>(state_->settings.size()),
             ++state_->serial};
  }
  const step_block_view block = state_->view();
  const update_options options = detail::make_update_options(plan().options);
  for (std::size_t i = 0; i < plan().nodes.size(); ++i) {
    const tensor_table_view table =
        tables().view_of_node(i, tables().tensors.data(), tables().chunks.data(), nullptr);
    switch (plan().nodes[i].kind) {
      case node_kind::grad_stats:
        host::advance_step(block, batch, host::grad_stats(table));
        break;
      case node_kind::advance_step:
        host::advance_step(block, batch, {});
        break;
      case node_kind::update:
        host::update(table, block, options);
        break;
    }
  }
}

step_status host_executor::status() {
  return detail::make_status(state_->image.scalars, state_->image.progress);
}

}  // namespace stepgraph
