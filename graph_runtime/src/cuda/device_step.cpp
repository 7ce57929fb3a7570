#include "device_step.hpp"

#include <fmt/format.h>

#include <cstring>

#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/check.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/kernels/launch_shape.hpp"

namespace stepgraph::cuda {
namespace {

/// Places arrays one after the other in one allocation, each at a multiple of 256 bytes.
class arena_layout {
 public:
  template <class Element>
  std::size_t reserve(std::size_t count) {
    const std::size_t offset = size_;
    size_ += (count * sizeof(Element) + 255) / 256 * 256;
    return offset;
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
  for (const plan_tensor& tensor : plan.tensors) {
    const tensor_operands& operands = tensor.operands;
    if (operands.parameter.numel == 0) continue;
    const auto check = [&](const tensor_view& view, operand_kind kind) {
      check_device_memory(view.data, device, operands.name, kind);
    };
    check(operands.parameter, operand_kind::parameter);
    check(*operands.gradient, operand_kind::gradient);
    if (operands.master) check(*operands.master, operand_kind::master);
    check(operands.exp_avg, operand_kind::exp_avg);
    check(operands.exp_avg_sq, operand_kind::exp_avg_sq);
  }
}

}  // namespace

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
                         cudaStream_t stream)
    : plan_(plan), tables_(tables), device_(cuda_device_of(plan)) {
  const device_guard guard(device_);
  if (is_capturing(stream)) {
    throw capture_error("an executor cannot be built on a stream that is being captured");
  }
  check_all_memory(plan, device_);

  const detail::step_block_image image(plan);
  const std::size_t groups = image.groups.size();
  const std::size_t partials = statistics_blocks(tables.chunks.size());
  arena_layout layout;
  const std::size_t scalars_at = layout.reserve<step_scalars>(1);
  const std::size_t step_at = layout.reserve<step_settings>(1);
  const std::size_t groups_at = layout.reserve<group_settings>(groups);
  const std::size_t progress_at = layout.reserve<group_progress>(groups);
  const std::size_t terms_at = layout.reserve<math::adam_terms>(groups);
  const std::size_t arrivals_at = layout.reserve<std::uint32_t>(1);
  const std::size_t tensors_at = layout.reserve<tensor_descriptor>(tables.tensors.size());
  const std::size_t chunks_at = layout.reserve<chunk_descriptor>(tables.chunks.size());
  const std::size_t uploaded = layout.size();
  const std::size_t sums_at = layout.reserve<double>(partials);
  const std::size_t non_finite_at = layout.reserve<std::uint32_t>(partials);
  memory_ = allocate_device(layout.size());

  // The upload's source: zero where nothing is written, as the arrival counter must be.
  std::vector<std::byte> staged(uploaded);
  const auto stage = [&](std::size_t offset, const auto* source, std::size_t count) {
    if (count != 0) std::memcpy(staged.data() + offset, source, count * sizeof(*source));
  };
  stage(scalars_at, &image.scalars, 1);
  stage(step_at, &image.step, 1);
  stage(groups_at, image.groups.data(), groups);
  stage(progress_at, image.progress.data(), groups);
  stage(tensors_at, tables.tensors.data(), tables.tensors.size());
  stage(chunks_at, tables.chunks.data(), tables.chunks.size());
  // From pageable memory: returns when the source has been read.
  STEPGRAPH_CUDA_CHECK(
      cudaMemcpyAsync(memory_.get(), staged.data(), uploaded, cudaMemcpyHostToDevice, stream));

  const auto at = [&](std::size_t offset) {
    return static_cast<std::byte*>(memory_.get()) + offset;
  };
  block_.scalars = reinterpret_cast<step_scalars*>(at(scalars_at));
  block_.step = reinterpret_cast<step_settings*>(at(step_at));
  block_.groups = reinterpret_cast<group_settings*>(at(groups_at));
  block_.progress = reinterpret_cast<group_progress*>(at(progress_at));
  block_.terms = reinterpret_cast<math::adam_terms*>(at(terms_at));
  block_.group_count = static_cast<std::uint32_t>(groups);
  tensors_ = reinterpret_cast<tensor_descriptor*>(at(tensors_at));
  chunks_ = reinterpret_cast<chunk_descriptor*>(at(chunks_at));
  workspace_.sums = reinterpret_cast<double*>(at(sums_at));
  workspace_.non_finite = reinterpret_cast<std::uint32_t*>(at(non_finite_at));
  workspace_.arrivals = reinterpret_cast<std::uint32_t*>(at(arrivals_at));
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

void device_step::enqueue(std::size_t node, const settings_batch& settings,
                          cudaStream_t stream) const {
  const plan_node& planned = plan_.nodes[node];
  const tensor_table_view table = tables_.view_of_node(node, tensors_, chunks_);
  const launch_order order = node == 0 ? launch_order::full : launch_order::programmatic;
  cudaError_t status = cudaSuccess;
  switch (planned.kind) {
    case node_kind::grad_stats:
      status = launch_grad_stats(table, workspace_, block_, settings, order, stream);
      break;
    case node_kind::advance_step:
      status = launch_advance_step(block_, settings, order, stream);
      break;
    case node_kind::update:
      status = launch_update(planned.signature, table, block_, {plan_.options.zero_gradients},
                             order, stream);
      break;
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

device_step::delivery device_step::pack_settings() {
  delivery sent;
  if (taken_.empty()) return sent;
  const std::size_t bytes = taken_.size() * sizeof(setting);
  sent.settings_buffer = &pool_.acquire(bytes);
  std::memcpy(sent.settings_buffer->memory.get(), taken_.data(), bytes);
  sent.settings = {static_cast<const setting*>(sent.settings_buffer->memory.get()),
                   static_cast<std::uint32_t>(taken_.size()), ++serial_};
  return sent;
}

void device_step::delivered(const delivery& sent, cudaStream_t stream) {
  if (sent.settings_buffer != nullptr) pool_.retire(*sent.settings_buffer, stream);
}

step_status device_step::read_status() const {
  const device_guard guard(device_);
  step_scalars scalars;
  std::vector<group_progress> progress(block_.group_count);
  STEPGRAPH_CUDA_CHECK(cudaDeviceSynchronize());
  STEPGRAPH_CUDA_CHECK(
      cudaMemcpy(&scalars, block_.scalars, sizeof(scalars), cudaMemcpyDeviceToHost));
  STEPGRAPH_CUDA_CHECK(cudaMemcpy(progress.data(), block_.progress,
                                  progress.size() * sizeof(group_progress),
                                  cudaMemcpyDeviceToHost));
  return detail::make_status(scalars, progress);
}

}  // namespace stepgraph::cuda
