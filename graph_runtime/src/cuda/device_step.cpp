#include "device_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/kernels/launch_shape.hpp"
#include "trace.hpp"

namespace stepgraph::cuda {
namespace {

/// Where an array lies in an arena.
template <class Element>
struct arena_place {
  std::size_t offset;

  Element* in(std::byte* base) const { return reinterpret_cast<Element*>(base + offset); }
};

/// Places arrays one after the other in one allocation, each at a multiple of 256 bytes.
class arena_layout {
 public:
  template <class Element>
  arena_place<Element> reserve(std::size_t count) {
    const std::size_t offset = size_;
    size_ += (count * sizeof(Element) + 255) / 256 * 256;
    return {offset};
  }
  std::size_t size() const noexcept { return size_; }

 private:
  std::size_t size_ = 0;
};

int cuda_device_of(const step_plan& plan) {
  if (plan.device.kind != device_kind::cuda && !plan.tensors.empty()) {
    throw usage_error(
        fmt::format("the plan's tensors are on {}, expected a CUDA device", name_of(plan.device)));
  }
  int count = 0;
  STEPGRAPH_CUDA_CHECK(cudaGetDeviceCount(&count));
  if (plan.device.index < 0 || plan.device.index >= count) {
    throw usage_error(
        fmt::format("the plan is for {}, but there are {} devices", name_of(plan.device), count));
  }
  if (plan.tensors.empty()) {
    int current = 0;
    STEPGRAPH_CUDA_CHECK(cudaGetDevice(&current));
    return current;
  }
  return plan.device.index;
}

void check_all_memory(const step_plan& plan, int device) {
  check_device_inputs(plan, device);
  for (const plan_tensor& tensor : plan.tensors) {
    const tensor_operands& operands = tensor.operands;
    if (operands.parameter.numel == 0) continue;
    const auto check = [&](const tensor_view& view, operand_kind kind) {
      check_device_memory(view.data, device, operands.name, kind);
      if (view.scales != nullptr) check_device_memory(view.scales, device, operands.name, kind);
    };
    check(*operands.gradient, operand_kind::gradient);
    if (tensor.gradient_only) continue;
    check(operands.parameter, operand_kind::parameter);
    if (operands.master) check(*operands.master, operand_kind::master);
    check(operands.exp_avg, operand_kind::exp_avg);
    check(operands.exp_avg_sq, operand_kind::exp_avg_sq);
    if (operands.max_exp_avg_sq) check(*operands.max_exp_avg_sq, operand_kind::max_exp_avg_sq);
    if (operands.parameter_scaling) {
      const fp8_scaling& scaling = *operands.parameter_scaling;
      for (const float* scalar : {scaling.scale, static_cast<const float*>(scaling.amax),
                                  static_cast<const float*>(scaling.scale_inv)}) {
        check_device_memory(scalar, device, operands.name, operand_kind::parameter);
      }
    }
  }
}

}  // namespace

void check_device_inputs(const step_plan& plan, int device) {
  const auto check = [&](const float* input, const std::string& what) {
    if (input == nullptr) return;
    cudaPointerAttributes attributes = {};
    STEPGRAPH_CUDA_CHECK(cudaPointerGetAttributes(&attributes, input));
    if (attributes.devicePointer != nullptr &&
        (attributes.type != cudaMemoryTypeDevice || attributes.device == device)) {
      return;
    }
    throw usage_error(fmt::format("{} at {} is not memory that cuda:{} can read", what,
                                  static_cast<const void*>(input), device));
  };
  check(plan.options.found_inf_input, "found_inf_input");
  check(plan.options.loss_scale_input, "loss_scale_input");
  for (const group_options& group : plan.groups) {
    check(group.learning_rate_input, fmt::format("group '{}': learning_rate_input", group.name));
    check(group.weight_decay_input, fmt::format("group '{}': weight_decay_input", group.name));
  }
}

void check_device_memory(const void* data, int device, const std::string& tensor,
                         operand_kind operand) {
  cudaPointerAttributes attributes = {};
  STEPGRAPH_CUDA_CHECK(cudaPointerGetAttributes(&attributes, data));
  const bool on_device =
      attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  if (on_device && (attributes.device == device || attributes.type == cudaMemoryTypeManaged)) {
    return;
  }
  throw usage_error(fmt::format(
      "tensor '{}': {} at {} is {} memory, expected memory of cuda:{}", tensor, name_of(operand),
      data, on_device ? fmt::format("cuda:{}", attributes.device) : "host", device));
}

device_step::device_step(const step_plan& plan, const detail::step_tables& tables,
                         const detail::step_block_image& image, cudaStream_t stream)
    : plan_(plan), tables_(tables), device_(cuda_device_of(plan)) {
  const device_guard guard(device_);
  if (is_capturing(stream)) {
    throw capture_error("an executor cannot be built on a stream that is being captured");
  }
  check_all_memory(plan, device_);

  const std::size_t groups = image.groups.size();
  const std::size_t norm_groups = image.norms.size();
  const std::size_t messages = statistics_blocks(tables.statistics_chunk_count()) +
                               prepare_blocks(static_cast<std::uint32_t>(groups)) - 1;
  arena_layout layout;
  const auto scalars = layout.reserve<step_scalars>(1);
  const auto step = layout.reserve<step_settings>(1);
  const auto group_settings_at = layout.reserve<group_settings>(groups);
  const auto progress = layout.reserve<group_progress>(groups);
  const auto terms = layout.reserve<math::adam_terms>(groups);
  const auto norms = layout.reserve<double>(norm_groups);
  const auto segments = layout.reserve<schedule_segment>(image.schedule_segments.size());
  const auto schedule_table = layout.reserve<double>(image.schedule_table.size());
  const auto tensor_arrivals = layout.reserve<std::uint32_t>(tables.tensors.size());
  const auto tensors = layout.reserve<tensor_descriptor>(tables.tensors.size());
  const auto chunks = layout.reserve<chunk_descriptor>(tables.chunks.size());
  const auto statistics_chunks = layout.reserve<chunk_descriptor>(tables.statistics_chunks.size());
  const auto norm_group_ends = layout.reserve<std::uint32_t>(tables.norm_group_ends.size());
  const auto messages_at = layout.reserve<block_message>(messages);
  const std::size_t uploaded = layout.size();
  const auto prepared_groups = layout.reserve<math::prepared_group>(groups);
  const auto totals = layout.reserve<double>(norm_groups + 1);
  const auto steps_left = layout.reserve<std::uint32_t>(1);
  memory_ = allocate_device(layout.size());

  // The upload's source: zero where nothing is written, as arrival counters must be.
  std::vector<std::byte> staged(uploaded);
  const auto stage = [&]<class Element>(arena_place<Element> place,
                                        const std::vector<Element>& source) {
    if (!source.empty()) {
      std::memcpy(staged.data() + place.offset, source.data(), source.size() * sizeof(Element));
    }
  };
  std::memcpy(staged.data() + scalars.offset, &image.scalars, sizeof(image.scalars));
  std::memcpy(staged.data() + step.offset, &image.step, sizeof(image.step));
  stage(group_settings_at, image.groups);
  stage(progress, image.progress);
  stage(norms, image.norms);
  stage(segments, image.schedule_segments);
  stage(schedule_table, image.schedule_table);
  stage(tensors, tables.tensors);
  stage(chunks, tables.chunks);
  stage(statistics_chunks, tables.statistics_chunks);
  stage(norm_group_ends, tables.norm_group_ends);
  const std::uint64_t earlier = tagged_word(tag_of_launch(image.scalars.launches), 0);
  stage(messages_at, std::vector(messages, block_message{{earlier, earlier, earlier, earlier}}));
  // From pageable memory: returns when the source has been read.
  STEPGRAPH_CUDA_CHECK(
      cudaMemcpyAsync(memory_.get(), staged.data(), uploaded, cudaMemcpyHostToDevice, stream));

  auto* const base = static_cast<std::byte*>(memory_.get());
  block_.scalars = scalars.in(base);
  block_.step = step.in(base);
  block_.groups = group_settings_at.in(base);
  block_.progress = progress.in(base);
  block_.schedules = {segments.in(base), schedule_table.in(base)};
  block_.terms = terms.in(base);
  block_.prepared_groups = prepared_groups.in(base);
  block_.norms = norms.in(base);
  block_.group_count = static_cast<std::uint32_t>(groups);
  block_.norm_group_count = static_cast<std::uint32_t>(norm_groups);
  tensors_ = tensors.in(base);
  chunks_ = chunks.in(base);
  statistics_chunks_ = tables.statistics_chunks.empty() ? chunks_ : statistics_chunks.in(base);
  norm_group_ends_ = norm_group_ends.in(base);
  tensor_arrivals_ = tensor_arrivals.in(base);
  totals_ = totals.in(base);
  messages_ = messages_at.in(base);
  steps_left_ = steps_left.in(base);
  settings_node_ = plan.advance_node();
  orders_.assign(plan.nodes.size(), launch_order::full);
  for (const plan_edge& edge : plan.edges) {
    if (edge.programmatic) orders_[edge.to] = launch_order::programmatic;
  }
  make_record_ring(image.scalars.launches);
  trail_.record(stream);
}

cudaStream_t device_step::side_stream() {
  if (!side_stream_) side_stream_ = make_stream();
  return side_stream_.get();
}

void device_step::make_record_ring(std::uint64_t launches) {
  if (plan_.options.record_capacity == 0) return;
  const std::size_t bytes = detail::record_ring::bytes_for(plan_);
  const std::shared_ptr<unique_pinned_memory> pinned =
      std::make_shared<unique_pinned_memory>(allocate_pinned(bytes));
  records_ = std::make_unique<detail::record_ring>(
      plan_, std::shared_ptr<void>(pinned, pinned->get()), launches);
  block_.records = records_->view();
}

device_step::~device_step() {
  // Launches made so far may still read the tables and the tensors, which the caller may free next.
  // Errors stay silent: a destructor must not hide the first one.
  int current = 0;
  static_cast<void>(cudaGetDevice(&current));
  static_cast<void>(cudaSetDevice(device_));
  static_cast<void>(cudaDeviceSynchronize());
  static_cast<void>(cudaSetDevice(current));
  static_cast<void>(cudaGetLastError());
}

foreign_context device_step::context_on(cudaStream_t stream) const noexcept {
  return {stream, totals_, &block_.scalars->next_loss_scale.scale};
}

void device_step::enqueue(std::size_t node, const settings_batch& settings, launch_order order,
                          cudaStream_t stream) const {
  const plan_node& planned = plan_.nodes[node];
  const trace_range range(planned.name.c_str());
  const tensor_table_view table = tables_.view_of_node(node, tensors_, chunks_, tensor_arrivals_);
  cudaError_t status = cudaSuccess;
  step_block_view block = block_;
  if (!planned.writes_record) block.records = {};
  switch (planned.kind) {
    case node_kind::grad_stats: {
      const statistics_table_view statistics =
          tables_.statistics_view(tensors_, statistics_chunks_, norm_group_ends_);
      const statistics_options options = detail::make_statistics_options(plan_.options);
      status =
          plan_.options.exchange_totals
              ? launch_grad_totals(statistics, options, messages_, block, totals_, order, stream)
              : launch_grad_stats(statistics, options, messages_, block, settings, order, stream);
      break;
    }
    case node_kind::advance_step:
      status =
          launch_advance_step(block, settings, plan_.options.exchange_totals ? totals_ : nullptr,
                              messages_, order, stream);
      break;
    case node_kind::update:
      status = launch_update(planned.signature, table, block,
                             detail::make_update_options(plan_.options), order, stream);
      break;
    case node_kind::scale_gradients:
      status = launch_scale_gradients({table.tensors, table.chunks, table.chunk_count}, block,
                                      order, stream);
      break;
    case node_kind::foreign:
      throw usage_error(fmt::format("foreign work '{}' is no kernel of the step", planned.name));
  }
  check(status, planned.name.c_str());
}

void device_step::copy_tensors(cudaStream_t stream) {
  const std::size_t bytes = tables_.tensors.size() * sizeof(tensor_descriptor);
  pinned_pool::buffer& buffer = pool_.acquire(bytes);
  std::memcpy(buffer.memory.get(), tables_.tensors.data(), bytes);
  STEPGRAPH_CUDA_CHECK(
      cudaMemcpyAsync(tensors_, buffer.memory.get(), bytes, cudaMemcpyHostToDevice, stream));
  pool_.retire(buffer, stream);
}

void device_step::copy_options(cudaStream_t stream) {
  const detail::step_block_image image(plan_);
  arena_layout layout;
  const auto step = layout.reserve<step_settings>(1);
  const auto groups = layout.reserve<group_settings>(image.groups.size());
  const auto segments = layout.reserve<schedule_segment>(image.schedule_segments.size());
  const auto table = layout.reserve<double>(image.schedule_table.size());
  pinned_pool::buffer& buffer = pool_.acquire(layout.size());
  auto* const staged = static_cast<std::byte*>(buffer.memory.get());
  *step.in(staged) = image.step;
  std::copy(image.groups.begin(), image.groups.end(), groups.in(staged));
  std::copy(image.schedule_segments.begin(), image.schedule_segments.end(), segments.in(staged));
  std::copy(image.schedule_table.begin(), image.schedule_table.end(), table.in(staged));
  // Bytes [first, last) of each of `count` elements; what lies outside belongs to the setters.
  const auto copy = [&]<class Element>(const Element* target, const Element* source,
                                       std::size_t count, std::size_t first, std::size_t last) {
    if (count == 0) return;
    auto* const to = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(target));
    STEPGRAPH_CUDA_CHECK(cudaMemcpy2DAsync(
        to + first, sizeof(Element), reinterpret_cast<const std::byte*>(source) + first,
        sizeof(Element), last - first, count, cudaMemcpyHostToDevice, stream));
  };
  copy(block_.step, step.in(staged), 1, offsetof(step_settings, skip_non_finite),
       sizeof(step_settings));
  const std::size_t learning_rate = offsetof(group_settings, learning_rate_schedule);
  const std::size_t weight_decay = offsetof(group_settings, weight_decay_schedule);
  const std::size_t held_by_hand = offsetof(schedule_reference, held_by_hand);
  const std::size_t count = image.groups.size();
  copy(block_.groups, groups.in(staged), count, offsetof(group_settings, flags),
       learning_rate + held_by_hand);
  copy(block_.groups, groups.in(staged), count, weight_decay, weight_decay + held_by_hand);
  copy(block_.groups, groups.in(staged), count, offsetof(group_settings, learning_rate_input),
       sizeof(group_settings));
  copy(block_.schedules.segments, segments.in(staged), image.schedule_segments.size(), 0,
       sizeof(schedule_segment));
  copy(block_.schedules.table, table.in(staged), image.schedule_table.size(), 0, sizeof(double));
  pool_.retire(buffer, stream);
}

device_step::delivery device_step::pack_settings() {
  delivery sent;
  if (taken_.empty()) return sent;
  sent.settings.count = static_cast<std::uint32_t>(taken_.size());
  sent.settings.serial = ++serial_;
  if (taken_.size() <= settings_batch::inline_capacity) {
    std::copy(taken_.begin(), taken_.end(), sent.settings.few);
    return sent;
  }
  const std::size_t bytes = taken_.size() * sizeof(setting);
  sent.settings_buffer = &pool_.acquire(bytes);
  std::memcpy(sent.settings_buffer->memory.get(), taken_.data(), bytes);
  sent.settings.entries = static_cast<const setting*>(sent.settings_buffer->memory.get());
  return sent;
}

void device_step::delivered(const delivery& sent, cudaStream_t stream) {
  if (sent.settings_buffer != nullptr) pool_.retire(*sent.settings_buffer, stream);
  taken_.clear();
}

void device_step::not_delivered(detail::pending_changes& pending) {
  pending.give_back(taken_);
  taken_.clear();
}

detail::step_block_image device_step::read_block() const {
  const device_guard guard(device_);
  detail::step_block_image image(plan_);
  const auto read = []<class Element>(Element* target, const Element* source, std::size_t count) {
    STEPGRAPH_CUDA_CHECK(
        cudaMemcpy(target, source, count * sizeof(Element), cudaMemcpyDeviceToHost));
  };
  STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
  read(&image.scalars, block_.scalars, 1);
  read(&image.step, block_.step, 1);
  read(image.groups.data(), block_.groups, image.groups.size());
  read(image.progress.data(), block_.progress, image.progress.size());
  read(image.norms.data(), block_.norms, image.norms.size());
  return image;
}

step_status device_step::read_status() const {
  detail::step_block_image image = read_block();
  return detail::make_status(image.scalars, image.progress, std::move(image.norms));
}

}  // namespace stepgraph::cuda
