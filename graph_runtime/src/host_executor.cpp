#include "stepgraph/host_executor.hpp"

#include <fmt/format.h>

#include "foreign_callbacks.hpp"
#include "pending_changes.hpp"
#include "record_ring.hpp"
#include "step_tables.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph {

/// The step block in host memory.
struct host_executor::state {
  std::vector<std::function<void()>> foreign;  ///< of each node
  detail::step_block_image image;
  std::vector<math::adam_terms> terms;
  std::vector<math::prepared_group> prepared_groups;
  std::vector<double> totals;  ///< of the norm groups, then the zeros
  record_ring_view records;
  std::vector<setting> settings;  ///< of the launch in progress
  std::uint64_t serial = 0;       ///< of the latest batch of settings

  state(const step_plan& plan, const host_foreign_work& work)
      : foreign(detail::callbacks_by_node(plan, work)),
        image(plan),
        terms(plan.groups.size()),
        prepared_groups(plan.groups.size()),
        totals(plan.norm_groups.size() + 1) {}

  step_block_view view() {
    step_block_view block;
    block.scalars = &image.scalars;
    block.step = &image.step;
    block.groups = image.groups.data();
    block.progress = image.progress.data();
    block.schedules = {image.schedule_segments.data(), image.schedule_table.data()};
    block.terms = terms.data();
    block.prepared_groups = prepared_groups.data();
    block.norms = image.norms.data();
    block.group_count = static_cast<std::uint32_t>(terms.size());
    block.norm_group_count = static_cast<std::uint32_t>(image.norms.size());
    block.records = records;
    return block;
  }
};

host_executor::host_executor(step_plan plan, host_foreign_work foreign)
    : executor(std::move(plan)) {
  const step_plan& checked = this->plan();
  if (checked.device.kind != device_kind::host) {
    throw usage_error(fmt::format("the plan's tensors are on {}, expected host for host_executor",
                                  name_of(checked.device)));
  }
  state_ = std::make_unique<state>(checked, foreign);
  if (checked.options.record_capacity == 0) return;
  const std::shared_ptr<void> memory(::operator new(detail::record_ring::bytes_for(checked)),
                                     [](void* bytes) { ::operator delete(bytes); });
  auto records = std::make_unique<detail::record_ring>(checked, memory);
  state_->records = records->view();
  set_records(std::move(records));
}

host_executor::~host_executor() = default;
host_executor::host_executor(host_executor&&) noexcept = default;
host_executor& host_executor::operator=(host_executor&&) noexcept = default;

void host_executor::check_memory(const void*, const std::string&, operand_kind) const {}

void host_executor::launch() {
  settings_batch batch;
  state_->settings.clear();
  if (pending().any()) {
    pending().take(state_->settings, [] {});
    batch.entries = state_->settings.data();
    batch.count = static_cast<std::uint32_t>(state_->settings.size());
    batch.serial = ++state_->serial;
  }
  const step_block_view block = state_->view();
  const update_options options = detail::make_update_options(plan().options);
  gradient_statistics statistics;
  for (std::size_t i = 0; i < plan().nodes.size(); ++i) {
    const auto chunks = tables().node_chunks[i];
    const tensor_descriptor* const tensors = tables().tensors.data();
    switch (plan().nodes[i].kind) {
      case node_kind::grad_stats:
        statistics = host::grad_stats(tables().statistics_view(tensors, tables().statistics_data(),
                                                               tables().norm_group_ends.data()),
                                      detail::make_statistics_options(plan().options),
                                      state_->totals.data());
        state_->totals.back() = static_cast<double>(statistics.zeros);
        if (!plan().options.exchange_totals) {
          host::advance_step(block, batch, statistics, state_->totals.data());
        }
        break;
      case node_kind::advance_step:
        // What other devices added may lie in the totals by now.
        if (statistics.measured != 0) {
          statistics.total = math::combined_total(state_->totals.data(), block.norm_group_count,
                                                  plan().options.norm);
          statistics.zeros = static_cast<std::uint64_t>(state_->totals.back());
        }
        host::advance_step(block, batch, statistics, state_->totals.data());
        break;
      case node_kind::update:
        host::update(tables().view_of_node(i, tensors, tables().chunks.data(), nullptr), block,
                     options);
        break;
      case node_kind::scale_gradients:
        host::scale_gradients({tensors, tables().chunks.data() + chunks.first, chunks.count},
                              block);
        break;
      case node_kind::foreign:
        if (plan().nodes[i].only_if_applied && block.scalars->skip != 0) break;
        try {
          state_->foreign[i]();
        } catch (...) {
          if (i < plan().advance_node()) pending().give_back(state_->settings);
          throw;
        }
        break;
    }
  }
}

const float* host_executor::loss_scale_address() const noexcept {
  return &state_->image.scalars.next_loss_scale.scale;
}

double* host_executor::totals_address() noexcept { return state_->totals.data(); }

step_status host_executor::status() {
  return detail::make_status(state_->image.scalars, state_->image.progress, state_->image.norms);
}

}  // namespace stepgraph
