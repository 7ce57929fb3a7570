# Run at build time: writes the source revision to OUTPUT, and touches it only when it changed, so
# that results name the sources they were built from even when CMake did not run again.
execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=*
  WORKING_DIRECTORY "${SOURCE_DIR}"
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT "${OUTPUT}" CONTENT
"#pragma once

namespace stepgraph::perf {
inline constexpr const char* commit = \"${commit}\";
}  // namespace stepgraph::perf
")
