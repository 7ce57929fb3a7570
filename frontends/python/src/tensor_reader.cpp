#include "tensor_reader.hpp"

namespace nb = nanobind;

namespace stepgraph::python {
namespace {

/// The function that views tensors of `type`, or null.
dlpack::view_of_object find_view(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::capsule_name)) return nullptr;
  const auto* header = static_cast<const dlpack::exchange_header*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::capsule_name));
  while (header != nullptr && header->version.major != dlpack::major_version) {
    header = header->previous;
  }
  return header == nullptr ? nullptr
                           : reinterpret_cast<const dlpack::exchange_table*>(header)->view;
}

/// Dense in the order of its dimensions; those of one element may have any stride.
bool is_contiguous(const dlpack::tensor& view, std::int64_t numel) {
  if (view.strides == nullptr || numel == 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t d = view.dimensions - 1; d >= 0; --d) {
    if (view.shape[d] != 1 && view.strides[d] != expected) return false;
    expected *= view.shape[d];
  }
  return true;
}

/// FNV-1a over device and sizes, a word at a time. Never 0.
std::uint64_t layout_of(const dlpack::tensor& view) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](std::int64_t value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001b3u;
  };
  add(view.where.type);
  add(view.where.id);
  for (std::int32_t d = 0; d < view.dimensions; ++d) add(view.shape[d]);
  return hash | 1u;
}

}  // namespace

tensor_reader::tensor_reader() {
  const nb::module_ torch = nb::module_::import_("torch");
  tensor_type_ = torch.attr("Tensor");
  parameter_type_ = torch.attr("nn").attr("Parameter");
  view_ = find_view(tensor_type_);
  gradient_ = tensor_type_.attr("grad");
  get_gradient_ = reinterpret_cast<descrgetfunc>(
      PyType_GetSlot(reinterpret_cast<PyTypeObject*>(gradient_.type().ptr()), Py_tp_descr_get));
}

nb::object tensor_reader::gradient_of(nb::handle tensor) const {
  if (get_gradient_ == nullptr || !is_plain(tensor)) return tensor.attr("grad");
  const nb::object gradient =
      nb::steal(get_gradient_(gradient_.ptr(), tensor.ptr(), tensor.type().ptr()));
  if (!gradient.is_valid()) nb::raise_python_error();
  return gradient;
}

tensor_place tensor_reader::read(nb::handle tensor, bool with_layout) const {
  tensor_place place;
  if (tensor.is_none()) {
    place.state = tensor_place::kind::absent;
    return place;
  }
  if (!read_by_table(tensor, place) && !read_by_methods(tensor, with_layout, place)) return {};
  place.state = tensor_place::kind::present;
  return place;
}

bool tensor_reader::read_by_table(nb::handle tensor, tensor_place& place) const {
  if (view_ == nullptr || !is_plain(tensor)) return false;
  dlpack::tensor view;
  if (view_(tensor.ptr(), &view) != 0) {
    PyErr_Clear();
    return false;
  }
  place.numel = 1;
  for (std::int32_t d = 0; d < view.dimensions; ++d) place.numel *= view.shape[d];
  place.contiguous = is_contiguous(view, place.numel);
  place.layout = layout_of(view);
  place.address = reinterpret_cast<std::uintptr_t>(view.data) + view.byte_offset;
  place.type = static_cast<std::uint64_t>(view.type.code) << 32 |
               static_cast<std::uint64_t>(view.type.bits) << 16 | view.type.lanes;
  return true;
}

bool tensor_reader::read_by_methods(nb::handle tensor, bool with_layout,
                                    tensor_place& place) const {
  try {
    place.address = nb::cast<std::uint64_t>(tensor.attr("data_ptr")());
    place.numel = nb::cast<std::int64_t>(tensor.attr("numel")());
    place.contiguous = nb::cast<bool>(tensor.attr("is_contiguous")());
    // torch has one object for each element type, which lives as long as torch.
    place.type = reinterpret_cast<std::uintptr_t>(nb::object(tensor.attr("dtype")).ptr());
    if (with_layout && is_plain(tensor)) {
      const nb::tuple layout =
          nb::make_tuple(nb::object(tensor.attr("device")), nb::object(tensor.attr("shape")));
      place.layout = static_cast<std::uint64_t>(nb::hash(layout)) | 1u;
    }
    return true;
  } catch (const nb::python_error&) {
    return false;
  } catch (const nb::cast_error&) {
    return false;
  }
}

}  // namespace stepgraph::python
