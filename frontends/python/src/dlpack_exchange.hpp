#pragma once

#include <cstdint>

/// The part of the DLPack C exchange API (DLPack 1.2, `type.__dlpack_c_exchange_api__`) that
/// reading where a tensor lies takes: the shape of its structures, which the standard fixes for
/// version 1.
namespace stepgraph::python::dlpack {

inline constexpr std::uint32_t major_version = 1;
inline constexpr const char* capsule_name = "dlpack_exchange_api";

struct device {
  std::int32_t type;
  std::int32_t id;
};

struct data_type {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

/// A borrowed view: valid as long as its tensor is not touched.
struct tensor {
  void* data;
  device where;
  std::int32_t dimensions;
  data_type type;
  std::int64_t* shape;
  std::int64_t* strides;  ///< in elements
  std::uint64_t byte_offset;
};

struct version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct exchange_header {
  dlpack::version version;
  exchange_header* previous;  ///< the table of an older version, if the library has one
};

/// Fills the view of a Python tensor of the type that has the table. 0, or -1 with a Python error.
using view_of_object = int (*)(void* object, tensor* out);

struct exchange_table {
  exchange_header header;
  void (*allocate)();
  void (*export_managed)();
  void (*import_managed)();
  view_of_object view;  ///< may be null
  void (*current_stream)();
};

}  // namespace stepgraph::python::dlpack
