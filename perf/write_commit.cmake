# Run at build time: writes the source revision to OUTPUT, and touches it only when it changed, so
# that results name the sources they were built from even when CMake did not run again. Changed
# results, which are no sources, do not make it -dirty.
execute_process(COMMAND git rev-parse --short=12 HEAD
  WORKING_DIRECTORY "${SOURCE_DIR}"
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
execute_process(COMMAND git diff --quiet HEAD -- . ":!README.md" ":!perf/results"
  WORKING_DIRECTORY "${SOURCE_DIR}" RESULT_VARIABLE changed ERROR_QUIET)
if(NOT commit)
  set(commit unknown)
elseif(changed)
  string(APPEND commit "-dirty")
endif()
file(CONFIGURE OUTPUT "${OUTPUT}" CONTENT
"#pragma once

namespace stepgraph::perf {
inline constexpr const char* commit = \"${commit}\";
}  // namespace stepgraph::perf
")
