#pragma once

#include <array>
#include <compare>
#include <cstdint>
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
  storage_format max_exp_avg_sq = storage_format::none;  ///< AMSGrad, in the format of exp_avg_sq

  auto operator<=>(const update_signature&) const = default;
};

/// "parameter/gradient/master/exp_avg/exp_avg_sq", for example "bf16/f32/f32/f32/f32"; with
/// AMSGrad followed by "/amsgrad".
std::string name_of(const update_signature& signature);

/// Why no executor can run the signature, or an empty string if every one can:
///   parameter       f32, f16, bf16, e4m3, e5m2
///   gradient        f32, f16, bf16
///   master          none, f32, f16; remainder with a bf16 parameter
///   moments         f32, f16, bf16, e4m3, independent of each other
///   max_exp_avg_sq  none or the format of exp_avg_sq
std::string why_unsupported(const update_signature& signature);

/// True if the signature has a kernel of its own; the others run the generic kernel, which gives
/// the same bits and decides on formats once a block.
bool is_tuned(const update_signature& signature);

/// Bytes that one element reads from memory in one update, without block scales.
std::size_t bytes_read_per_element(const update_signature& signature);
/// Bytes that one element writes to memory in one update, without block scales.
std::size_t bytes_written_per_element(const update_signature& signature);
/// Block-scaled operands of the signature: each reads and writes one byte for every
/// scale_block_elements elements.
std::size_t block_scaled_operands(const update_signature& signature);
/// Bytes that an update of `numel` elements moves, block scales included.
std::uint64_t update_bytes(const update_signature& signature, std::uint64_t numel);

}  // namespace stepgraph
