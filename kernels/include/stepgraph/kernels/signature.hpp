#pragma once

#include <array>
#include <compare>
#include <string>

#include "stepgraph/math/storage_format.hpp"

namespace stepgraph {

/// The storage formats of one update. Tensors of one signature share one kernel launch.
struct update_signature {
  storage_format parameter = storage_format::f32;
  storage_format gradient = storage_format::f32;
  storage_format master = storage_format::none;
  storage_format exp_avg = storage_format::f32;
  storage_format exp_avg_sq = storage_format::f32;

  auto operator<=>(const update_signature&) const = default;
};

/// "parameter/gradient/master/exp_avg/exp_avg_sq", for example "bf16/f32/f32/f32/f32".
std::string name_of(const update_signature& signature);

/// True if every executor can run the signature: the parameter, gradient and moments exist in a
/// format the kernels know, and the master is absent or f32.
bool is_supported(const update_signature& signature);

/// True if the signature has a kernel of its own; the others run the generic kernel, which gives
/// the same bits and decides on formats once a block.
bool is_tuned(const update_signature& signature);

/// Bytes that one element moves through memory in one update: every operand read once, all but the
/// gradient written once.
std::size_t bytes_per_element(const update_signature& signature);

}  // namespace stepgraph
