#include "stepgraph/host_executor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "foreign_callbacks.hpp"
#include "pending_changes.hpp"
#include "plan_update.hpp"
#include "record_ring.hpp"
#include "step_tables.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/kernels/host_loops.hpp"

namespace stepgraph {

/// The step block in host memory.
struct host_executor::state {
  std::vector<std::function<void()>> foreign;  ///< of each node
  detail::step_block_image image;
  /// The table as of the launch in progress: re-binding may change the executor's meanwhile.
  std::vector<tensor_descriptor> tensors;
  std::vector<math::adam_terms> terms;
  std::vector<math::prepared_group> prepared_groups;
  std::vector<double> totals;  ///< of the norm groups, then the zeros
  record_ring_view records;
  std::vector<setting> settings;  ///< of the launch in progress
  std::uint64_t serial = 0;       ///< of the latest batch of settings

  state(const step_plan& plan, const detail::step_tables& tables, detail::step_block_image contents,
        const host_foreign_work& work)
      : foreign(detail::callbacks_by_node(plan, work)),
        image(std::move(contents)),
        tensors(tables.tensors),
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

namespace {

/// The ring of a plan that writes records, after so many launches; null if it writes none.
std::unique_ptr<detail::record_ring> make_ring(const step_plan& plan, std::uint64_t launches) {
  if (plan.options.record_capacity == 0) return nullptr;
  const std::shared_ptr<void> memory(::operator new(detail::record_ring::bytes_for(plan)),
                                     [](void* bytes) { ::operator delete(bytes); });
  return std::make_unique<detail::record_ring>(plan, memory, launches);
}

}  // namespace

host_executor::host_executor(step_plan plan, host_foreign_work foreign)
    : executor(std::move(plan)) {
  const step_plan& checked = this->plan();
  if (checked.device.kind != device_kind::host) {
    throw usage_error(fmt::format("the plan's tensors are on {}, expected host for host_executor",
                                  name_of(checked.device)));
  }
  state_ = std::make_unique<state>(checked, tables(), detail::step_block_image(checked), foreign);
  auto records = make_ring(checked, 0);
  if (records) state_->records = records->view();
  set_records(std::move(records));
}

host_executor::~host_executor() = default;
host_executor::host_executor(host_executor&&) noexcept = default;
host_executor& host_executor::operator=(host_executor&&) noexcept = default;

void host_executor::check_memory(const void*, const std::string&, operand_kind) const {}

void host_executor::check_inputs(const step_plan&) const {}

device_location host_executor::device() const { return {device_kind::host, 0}; }

update_report host_executor::update(step_plan next, std::optional<host_foreign_work> foreign) {
  const auto update = prepare_update(std::move(next));
  const bool in_place = update->need.path <= update_path::table_write;
  // Built apart and moved in: the loss scale keeps its address.
  state fresh(*update->plan, *update->tables,
              detail::continued(state_->image, plan(), *update->plan, update->need),
              foreign ? *foreign : detail::callbacks_by_name(plan(), state_->foreign));
  auto records = in_place ? nullptr : make_ring(*update->plan, fresh.image.scalars.launches);
  if (in_place) fresh.records = state_->records;
  if (records) fresh.records = records->view();
  update->report.path = std::min(update->report.path, update_path::table_write);
  if (!in_place) drain_records();
  return commit_rebuilt(*update, in_place ? nullptr : &records, [&] { std::swap(*state_, fresh); });
}

void host_executor::launch() {
  check_ledger();
  settings_batch batch;
  state_->settings.clear();
  if (pending().any()) {
    pending().take(state_->settings, [&](const detail::changed_parts& changed) {
      if (changed.tensors) state_->tensors = tables().tensors;
    });
    batch.entries = state_->settings.data();
    batch.count = static_cast<std::uint32_t>(state_->settings.size());
    batch.serial = ++state_->serial;
  }
  const step_block_view block = state_->view();
  const update_options options = detail::make_update_options(plan().options);
  gradient_statistics statistics;
  for (std::size_t i = 0; i < plan().nodes.size(); ++i) {
    const auto chunks = tables().node_chunks[i];
    const tensor_descriptor* const tensors = state_->tensors.data();
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
