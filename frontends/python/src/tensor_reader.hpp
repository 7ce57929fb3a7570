#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "dlpack_exchange.hpp"

namespace stepgraph::python {

/// Where a tensor is and what it is, as far as a step depends on it.
struct tensor_place {
  enum class kind : std::uint8_t {
    unknown,  ///< nothing was noted yet, or the tensor cannot be read: never equal
    absent,   ///< there is none
    present,
  };
  kind state = kind::unknown;
  bool contiguous = false;
  std::uint64_t address = 0;
  std::uint64_t type = 0;  ///< an identity of the element type
  std::int64_t numel = 0;
  /// Device and sizes in one number; 0: not read, so that two places cannot be compared by it.
  std::uint64_t layout = 0;

  /// Whether a step built for one may run with the other.
  bool same_as(const tensor_place& other) const noexcept {
    return state == other.state && state != kind::unknown && address == other.address &&
           type == other.type && numel == other.numel && contiguous == other.contiguous;
  }

  /// Whether they are the same but for the address: what re-binding alone can follow.
  bool moved_from(const tensor_place& other) const noexcept {
    return state == kind::present && other.state == kind::present && type == other.type &&
           numel == other.numel && contiguous && other.contiguous && layout == other.layout &&
           layout != 0;
  }
};

/// Reads torch tensors without linking torch: plain tensors and parameters through the DLPack C
/// exchange API where torch has it (2.10), whatever else by the methods of the tensor.
class tensor_reader {
 public:
  /// Imports torch. Throws nanobind::python_error.
  tensor_reader();

  /// `tensor` may be None. Clears errors of tensors that have no memory of their own (meta, sparse,
  /// functional): their place is unknown. The layout costs more without the table, so there it is
  /// read only where asked for.
  tensor_place read(nanobind::handle tensor, bool with_layout = false) const;

  /// `tensor.grad`, without looking the name up again for plain tensors and parameters.
  nanobind::object gradient_of(nanobind::handle tensor) const;

 private:
  /// Of these types alone: what a subclass holds is not always what its own storage says.
  bool is_plain(nanobind::handle tensor) const noexcept {
    const nanobind::handle type = tensor.type();
    return type.is(parameter_type_) || type.is(tensor_type_);
  }
  bool read_by_table(nanobind::handle tensor, tensor_place& place) const;
  bool read_by_methods(nanobind::handle tensor, bool with_layout, tensor_place& place) const;

  nanobind::object tensor_type_;
  nanobind::object parameter_type_;
  dlpack::view_of_object view_ = nullptr;
  nanobind::object gradient_;  ///< the descriptor of `grad`
  descrgetfunc get_gradient_ = nullptr;
};

}  // namespace stepgraph::python
