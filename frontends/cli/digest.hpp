#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace stepgraph::cli {

/// FNV-1a over bytes: tells whether two runs ended with the same bits.
class digest {
 public:
  void add(const void* bytes, std::size_t count);
  std::string text() const;  ///< 16 hexadecimal digits

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace stepgraph::cli
