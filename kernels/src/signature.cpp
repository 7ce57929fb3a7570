#include "stepgraph/kernels/signature.hpp"

namespace stepgraph {
namespace {

bool is_floating(storage_format format) { return format != storage_format::none; }

}  // namespace

std::string name_of(const update_signature& signature) {
  std::string name;
  for (const storage_format format : {signature.parameter, signature.gradient, signature.master,
                                      signature.exp_avg, signature.exp_avg_sq}) {
    if (!name.empty()) name += '/';
    name += name_of(format);
  }
  return name;
}

bool is_supported(const update_signature& signature) {
  return is_floating(signature.parameter) && is_floating(signature.gradient) &&
         (signature.master == storage_format::none || signature.master == storage_format::f32) &&
         signature.exp_avg == storage_format::f32 && signature.exp_avg_sq == storage_format::f32;
}

bool is_tuned(const update_signature& signature) {
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq)      \
  if (signature == update_signature{storage_format::parameter, storage_format::gradient, \
                                    storage_format::master, storage_format::exp_avg,     \
                                    storage_format::exp_avg_sq}) {                       \
    return true;                                                                         \
  }
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  return false;
}

std::size_t bytes_per_element(const update_signature& signature) {
  // With a master, the stored parameter is written and not read.
  const std::size_t parameter_accesses = signature.master == storage_format::none ? 2 : 1;
  return parameter_accesses * element_size(signature.parameter) + element_size(signature.gradient) +
         2 * element_size(signature.master) + 2 * element_size(signature.exp_avg) +
         2 * element_size(signature.exp_avg_sq);
}

}  // namespace stepgraph
