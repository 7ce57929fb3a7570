#include "stepgraph/tensor_view.hpp"

namespace stepgraph {

std::string name_of(device_location location) {
  return location.kind == device_kind::host ? "host" : "cuda:" + std::to_string(location.index);
}

}  // namespace stepgraph
