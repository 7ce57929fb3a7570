#include "tensor_checks.hpp"

#include <fmt/format.h>

#include "stepgraph/error.hpp"

namespace stepgraph::libtorch::detail {
namespace {

storage_format format_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return storage_format::f32;
    case at::kHalf:
      return storage_format::f16;
    case at::kBFloat16:
      return storage_format::bf16;
    default:
      return storage_format::none;
  }
}

void check_operand(const std::string& name, const char* operand, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) {
    throw usage_error(fmt::format("{}: the {} is sparse (layout {}), expected a dense one", name,
                                  operand, c10::str(tensor.layout())));
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    throw usage_error(fmt::format("{}: the {} is on {}, expected cpu or cuda", name, operand,
                                  tensor.device().str()));
  }
  if (format_of(tensor.scalar_type()) == storage_format::none) {
    throw usage_error(fmt::format("{}: the {} has type {}, expected Float, Half or BFloat16", name,
                                  operand, c10::toString(tensor.scalar_type())));
  }
  if (!tensor.is_contiguous() && !tensor.is_non_overlapping_and_dense()) {
    throw usage_error(
        fmt::format("{}: the {} is not contiguous (sizes {}, strides {}), expected dense memory",
                    name, operand, c10::str(tensor.sizes()), c10::str(tensor.strides())));
  }
}

}  // namespace

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return a.numel() == b.numel();
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

void check_parameter(const std::string& name, const at::Tensor& parameter) {
  if (!parameter.defined()) {
    throw usage_error(fmt::format("{}: the tensor is undefined, expected a parameter", name));
  }
  check_operand(name, "parameter", parameter);
}

void check_gradient(const std::string& name, const at::Tensor& parameter,
                    const at::Tensor& gradient) {
  if (!gradient.defined()) {
    throw usage_error(fmt::format(
        "{}: the parameter has no gradient, expected one at every step{}", name,
        parameter.requires_grad()
            ? " (run backward first; leave unused parameters out of the optimizer)"
            : " (it does not require one; leave frozen parameters out of the optimizer)"));
  }
  check_operand(name, "gradient", gradient);
  if (gradient.device() != parameter.device()) {
    throw usage_error(fmt::format("{}: the gradient is on {}, expected {} as the parameter", name,
                                  gradient.device().str(), parameter.device().str()));
  }
  if (gradient.sizes() != parameter.sizes()) {
    throw usage_error(fmt::format("{}: the gradient has sizes {}, expected {} as the parameter",
                                  name, c10::str(gradient.sizes()), c10::str(parameter.sizes())));
  }
  if (!same_layout(gradient, parameter)) {
    throw usage_error(fmt::format(
        "{}: the gradient has strides {}, expected {} as the parameter (not contiguous)", name,
        c10::str(gradient.strides()), c10::str(parameter.strides())));
  }
}

void check_scalar_input(const std::string& name, const at::Tensor& tensor) {
  check_operand(name, "input", tensor);
  if (tensor.scalar_type() != at::kFloat || tensor.numel() != 1) {
    throw usage_error(fmt::format("{}: the tensor has type {} and {} elements, expected one Float",
                                  name, c10::toString(tensor.scalar_type()), tensor.numel()));
  }
}

device_location location_of(c10::Device device) {
  if (!device.is_cuda()) return {};
  return {device_kind::cuda, device.index()};
}

tensor_view view_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), static_cast<std::uint64_t>(tensor.numel()),
          format_of(tensor.scalar_type()), location_of(tensor.device())};
}

held_memory::held_memory(const at::Tensor& tensor)
    : tensor_(tensor),
      storage_(tensor.storage()),
      data_(tensor.mutable_data_ptr()),
      offset_(tensor.storage_offset()),
      numel_(tensor.numel()),
      type_(tensor.dtype()),
      plain_(tensor.is_contiguous()) {
  // After mutable_data_ptr, which may have copied a lazily shared storage.
  base_ = storage_.data();
}

}  // namespace stepgraph::libtorch::detail
