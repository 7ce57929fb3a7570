#pragma once

#include "operand_formats.cuh"

/// The operands of the update of one tensor, by role: which memory a weight or a moment is, and in
/// which format. The formats are known_format in a tuned kernel, table_format in the generic one.
namespace stepgraph::cuda {

/// A moment: its format and where it lies.
template <class Format, bool Root>
struct moment {
  Format format;
  void* data;
  std::uint8_t* scales;

  template <int Width, class Access>
  __device__ __forceinline__ stored_bits<Width> fetch(Access at) const {
    stored_bits<Width> bits;
    visit([&](auto operand) { bits = operand.template fetch<Width>(at); });
    return bits;
  }
  template <int Width>
  __device__ __forceinline__ float_pack<Width> decode(const stored_bits<Width>& bits) const {
    float_pack<Width> pack = {};
    visit([&](auto operand) { pack = operand.decode(bits); });
    return pack;
  }
  template <int Width, class Access>
  __device__ __forceinline__ void store(Access at, const float_pack<Width>& pack) const {
    visit([&](auto operand) { operand.store(at, pack); });
  }

 private:
  template <class Body>
  __device__ __forceinline__ void visit(Body&& body) const {
    using enum storage_format;
    format.template visit<f32, f16, bf16, e4m3>(
        [&](auto known) { body(state_of<known.value, Root>(data, scales)); });
  }
};

template <class Parameter, class Gradient, class Master, class ExpAvg, class ExpAvgSq,
          class MaxExpAvgSq>
struct update_operands {
  const tensor_descriptor& tensor;
  Parameter parameter;
  Gradient gradient;
  Master master;
  ExpAvg exp_avg;
  ExpAvgSq exp_avg_sq;
  MaxExpAvgSq max_exp_avg_sq;
  float parameter_scale;  ///< of an FP8 parameter

  __device__ explicit update_operands(const tensor_descriptor& descriptor)
      : tensor(descriptor),
        parameter(descriptor.signature.parameter),
        gradient(descriptor.signature.gradient),
        master(descriptor.signature.master),
        exp_avg(descriptor.signature.exp_avg),
        exp_avg_sq(descriptor.signature.exp_avg_sq),
        max_exp_avg_sq(descriptor.signature.max_exp_avg_sq),
        parameter_scale(has_fp8_parameter() ? *in_global_memory(descriptor.parameter_scaling.scale)
                                            : 1.0f) {}

  __device__ bool has_master() const { return master.value() != storage_format::none; }
  __device__ bool has_maximum() const { return max_exp_avg_sq.value() != storage_format::none; }
  __device__ bool has_fp8_parameter() const { return is_fp8(parameter.value()); }

  template <int Width, class Access>
  __device__ __forceinline__ stored_bits<Width> fetch_gradient(Access at) const {
    stored_bits<Width> bits;
    visit_gradient([&](auto operand) { bits = operand.template fetch<Width>(at); });
    return bits;
  }
  template <int Width>
  __device__ __forceinline__ float_pack<Width> decode_gradient(
      const stored_bits<Width>& bits) const {
    float_pack<Width> pack = {};
    visit_gradient([&](auto operand) { pack = operand.decode(bits); });
    return pack;
  }
  template <int Width, class Access>
  __device__ __forceinline__ void store_gradient(Access at, const float_pack<Width>& pack) const {
    visit_gradient([&](auto operand) { operand.store(at, pack); });
  }

  /// The parameter: the master, where there is one.
  template <int Width, class Access>
  __device__ __forceinline__ stored_bits<Width> fetch_weight(Access at) const {
    stored_bits<Width> bits;
    visit_weight([&](auto operand) { bits = operand.template fetch<Width>(at); });
    return bits;
  }
  template <int Width>
  __device__ __forceinline__ float_pack<Width> decode_weight(const stored_bits<Width>& bits) const {
    float_pack<Width> pack = {};
    visit_weight([&](auto operand) { pack = operand.decode(bits); });
    return pack;
  }
  /// Stores the parameter and its master.
  template <int Width, class Access>
  __device__ __forceinline__ void store_weight(Access at, const float_pack<Width>& pack,
                                               const math::rounding_source& source) const {
    visit_master([&](auto operand) { operand.store(at, pack); });
    if (master.value() == storage_format::remainder) return;  // stored both
    if (source.stochastic && !has_master() && parameter.value() == storage_format::bf16) {
      store_stochastically(tensor.parameter, source, at, pack);
      return;
    }
    visit_parameter([&](auto operand) { operand.store(at, pack); });
  }

  /// The moments: each is a format, an address and the address of its scales.
  __device__ auto first_moment() const {
    return moment<ExpAvg, false>{exp_avg, tensor.exp_avg, tensor.exp_avg_scales};
  }
  __device__ auto second_moment() const {
    return moment<ExpAvgSq, true>{exp_avg_sq, tensor.exp_avg_sq, tensor.exp_avg_sq_scales};
  }
  __device__ auto largest_second_moment() const {
    return moment<MaxExpAvgSq, true>{max_exp_avg_sq, tensor.max_exp_avg_sq,
                                     tensor.max_exp_avg_sq_scales};
  }

 private:
  template <class Body>
  __device__ __forceinline__ void visit_parameter(Body&& body) const {
    using enum storage_format;
    parameter.template visit<f32, f16, bf16, e4m3, e5m2>(
        [&](auto format) { body(parameter_of<format.value>(tensor, parameter_scale)); });
  }
  template <class Body>
  __device__ __forceinline__ void visit_gradient(Body&& body) const {
    using enum storage_format;
    gradient.template visit<f32, f16, bf16>(
        [&](auto format) { body(plain_operand<format.value>{tensor.gradient}); });
  }
  template <class Body>
  __device__ __forceinline__ void visit_master(Body&& body) const {
    using enum storage_format;
    master.template visit<f32, f16, storage_format::remainder>([&](auto format) {
      if constexpr (format.value == storage_format::remainder) {
        body(joined_operand{tensor.parameter, tensor.master});
      } else {
        body(state_of<format.value, false>(tensor.master, tensor.master_scales));
      }
    });
  }
  template <class Body>
  __device__ __forceinline__ void visit_weight(Body&& body) const {
    if (has_master()) {
      visit_master(body);
    } else {
      visit_parameter(body);
    }
  }
};

/// Formats that are compiled in, with the shape of their kernel.
template <storage_format Parameter, storage_format Gradient, storage_format Master,
          storage_format ExpAvg, storage_format ExpAvgSq>
struct tuned_formats {
  using operands = update_operands<known_format<Parameter>, known_format<Gradient>,
                                   known_format<Master>, known_format<ExpAvg>,
                                   known_format<ExpAvgSq>, known_format<storage_format::none>>;
  /// Elements of one access. Where an operand has 4 bytes an element, 4 fill its 16-byte access;
  /// with more, neighbouring threads would no longer touch neighbouring memory. With 8-bit moments
  /// 4 as well: more would take more registers than the conversions leave.
  static constexpr int width = element_size(Parameter) == 2 && element_size(Gradient) == 2 &&
                                       element_size(Master) <= 2 && element_size(ExpAvg) == 2 &&
                                       element_size(ExpAvgSq) == 2
                                   ? 8
                                   : 4;
  /// True if a thread's elements must be consecutive: they share a scale or random numbers.
  static constexpr bool consecutive =
      is_block_scaled(Master) || is_block_scaled(ExpAvg) || is_block_scaled(ExpAvgSq) ||
      (Parameter == storage_format::bf16 && Master == storage_format::none);
  /// Blocks that must find room on one multiprocessor; 0: the compiler chooses. A thread of 8
  /// elements has but one access to each operand under way, so there must be many.
  static constexpr int least_blocks = width == 8 ? 9 : 0;
};

/// Formats that are read from the tensor table.
struct generic_formats {
  using operands = update_operands<table_format, table_format, table_format, table_format,
                                   table_format, table_format>;
  /// More elements for each branch on a format.
  static constexpr int width = 8;
  static constexpr bool consecutive = true;
  static constexpr int least_blocks = 0;
};

}  // namespace stepgraph::cuda
