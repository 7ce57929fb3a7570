#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <string>

#include "stepgraph/tensor_view.hpp"

/// What a torch tensor must be to be an operand of a step. Messages start with the parameter's
/// name.
namespace stepgraph::libtorch::detail {

/// Refuses an undefined, sparse, overlapping or partly strided tensor, other element types than
/// f32, f16 and bf16, and devices other than the CPU and CUDA.
void check_parameter(const std::string& name, const at::Tensor& parameter);

/// Refuses a missing gradient, what `check_parameter` refuses, and a gradient whose device, sizes
/// or strides are not the parameter's.
void check_gradient(const std::string& name, const at::Tensor& parameter,
                    const at::Tensor& gradient);

/// Refuses anything but one float32 in dense memory of the CPU or CUDA.
void check_scalar_input(const std::string& name, const at::Tensor& tensor);

/// True if walking the memory of both in address order meets the elements in the same order.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

/// The tensor's memory. The tensor has passed a check above or was made here.
tensor_view view_of(const at::Tensor& tensor);

device_location location_of(c10::Device device);

/// Memory an executor was told about, with references that keep it alive, and what to compare to
/// see that a tensor still is that memory. The storage is held beside the tensor because
/// `set_data` gives a tensor another storage.
class held_memory {
 public:
  held_memory() = default;
  explicit held_memory(const at::Tensor& tensor);

  /// True if `current` is the same object on the same memory with the same meaning as when it was
  /// bound. False says nothing: look closer.
  bool is_surely(const c10::TensorImpl& current) const {
    return &current == tensor_.unsafeGetTensorImpl() && plain_ &&
           current.unsafe_storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl() &&
           storage_.data() == base_ && current.storage_offset() == offset_ &&
           current.numel() == numel_ && current.dtype() == type_ && current.is_contiguous();
  }

  const at::Tensor& tensor() const noexcept { return tensor_; }
  const c10::Storage& storage() const noexcept { return storage_; }
  void* data() const noexcept { return data_; }
  caffe2::TypeMeta type() const noexcept { return type_; }

 private:
  at::Tensor tensor_;
  c10::Storage storage_;
  const void* base_ = nullptr;  ///< start of the storage's memory
  void* data_ = nullptr;        ///< first element
  int64_t offset_ = 0;
  int64_t numel_ = 0;
  caffe2::TypeMeta type_;
  bool plain_ = false;  ///< contiguous, so that equal sizes mean equal layouts
};

}  // namespace stepgraph::libtorch::detail
