#include "digest.hpp"

#include <fmt/format.h>

namespace stepgraph::cli {

void digest::add(const void* bytes, std::size_t count) {
  const auto* const begin = static_cast<const unsigned char*>(bytes);
  for (const auto* byte = begin; byte != begin + count; ++byte) {
    value_ = (value_ ^ *byte) * 0x100000001b3u;
  }
}

std::string digest::text() const { return fmt::format("{:016x}", value_); }

}  // namespace stepgraph::cli
