#include "stepgraph/kernels/signature.hpp"

#include <algorithm>

namespace stepgraph {
namespace {

using enum storage_format;

bool is_one_of(storage_format format, std::initializer_list<storage_format> formats) {
  return std::find(formats.begin(), formats.end(), format) != formats.end();
}

/// With a master the parameter is written only; a remainder is half of its master, so that there
/// the parameter is read too.
bool reads_parameter(const update_signature& signature) {
  return signature.master == none || signature.master == remainder;
}

}  // namespace

std::string name_of(const update_signature& signature) {
  std::string name;
  for (const storage_format format : {signature.parameter, signature.gradient, signature.master,
                                      signature.exp_avg, signature.exp_avg_sq}) {
    if (!name.empty()) name += '/';
    name += name_of(format);
  }
  if (signature.max_exp_avg_sq != none) name += "/amsgrad";
  return name;
}

std::string why_unsupported(const update_signature& signature) {
  const auto refuse = [](const char* operand, storage_format found, const char* expected) {
    return std::string(operand) + " is " + name_of(found) + ", expected " + expected;
  };
  if (!is_one_of(signature.parameter, {f32, f16, bf16, e4m3, e5m2})) {
    return refuse("parameter", signature.parameter, "f32, f16, bf16, e4m3 or e5m2");
  }
  if (!is_one_of(signature.gradient, {f32, f16, bf16})) {
    return refuse("gradient", signature.gradient, "f32, f16 or bf16");
  }
  if (signature.master == remainder && signature.parameter != bf16) {
    return refuse("parameter", signature.parameter, "bf16 with a remainder master");
  }
  if (!is_one_of(signature.master, {none, f32, f16, remainder})) {
    return refuse("master", signature.master, "none, f32, f16 or remainder");
  }
  if (!is_one_of(signature.exp_avg, {f32, f16, bf16, e4m3})) {
    return refuse("exp_avg", signature.exp_avg, "f32, f16, bf16 or e4m3");
  }
  if (!is_one_of(signature.exp_avg_sq, {f32, f16, bf16, e4m3})) {
    return refuse("exp_avg_sq", signature.exp_avg_sq, "f32, f16, bf16 or e4m3");
  }
  if (!is_one_of(signature.max_exp_avg_sq, {none, signature.exp_avg_sq})) {
    return refuse("max_exp_avg_sq", signature.max_exp_avg_sq, "none or the format of exp_avg_sq");
  }
  return {};
}

bool is_tuned(const update_signature& signature) {
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq) \
  if (signature == update_signature{parameter, gradient, master, exp_avg, exp_avg_sq}) return true;
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  return false;
}

std::size_t bytes_read_per_element(const update_signature& signature) {
  return (reads_parameter(signature) ? element_size(signature.parameter) : 0) +
         element_size(signature.gradient) + element_size(signature.master) +
         element_size(signature.exp_avg) + element_size(signature.exp_avg_sq) +
         element_size(signature.max_exp_avg_sq);
}

std::size_t bytes_written_per_element(const update_signature& signature) {
  return element_size(signature.parameter) + element_size(signature.master) +
         element_size(signature.exp_avg) + element_size(signature.exp_avg_sq) +
         element_size(signature.max_exp_avg_sq);
}

std::size_t block_scaled_operands(const update_signature& signature) {
  std::size_t count = 0;
  for (const storage_format format :
       {signature.master, signature.exp_avg, signature.exp_avg_sq, signature.max_exp_avg_sq}) {
    if (is_block_scaled(format)) ++count;
  }
  return count;
}

std::uint64_t update_bytes(const update_signature& signature, std::uint64_t numel) {
  return numel * (bytes_read_per_element(signature) + bytes_written_per_element(signature)) +
         2 * block_scaled_operands(signature) * scale_count(numel);
}

}  // namespace stepgraph
