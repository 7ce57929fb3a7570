# stepgraph_add_test(<target> SOURCES <file>... [LIBRARIES <library>...] [TORCH] [WHOLE])
#
# A GoogleTest program whose tests ctest lists one by one, as <target>.<suite>.<test>. Tests run with the repository root as
# working directory and include headers relative to tests/.
#   Gpu*      a suite (or an instantiation prefix) whose name starts with Gpu needs a GPU: label gpu
#   TORCH     link stepgraph::torch and use the shared precompiled header
#   WHOLE     one ctest entry for the host tests and one for the Gpu* tests, for programs whose
#             start costs far more than their tests
# A skipped test shows as skipped, never as passed.

include(GoogleTest)

set(STEPGRAPH_TEST_ENVIRONMENT)
if(STEPGRAPH_SANITIZE MATCHES "address")
  # libgomp keeps its thread pool until the process ends.
  set(STEPGRAPH_TEST_ENVIRONMENT
      "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/leaks.supp:print_suppressions=0")
endif()

function(stepgraph_add_test target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH;WHOLE" "" "SOURCES;LIBRARIES")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
    message(FATAL_ERROR "stepgraph_add_test(${target}): unexpected '${arg_UNPARSED_ARGUMENTS}' or no SOURCES")
  endif()

  add_executable(${target} ${arg_SOURCES})
  stepgraph_target(${target})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES} GTest::gtest_main GTest::gmock)
  if(arg_TORCH)
    stepgraph_torch_pch(${target})
  endif()

  set(gpu_filter "Gpu*:*/Gpu*")
  set(host_properties SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]" TIMEOUT 600)
  if(STEPGRAPH_TEST_ENVIRONMENT)
    list(APPEND host_properties ENVIRONMENT "${STEPGRAPH_TEST_ENVIRONMENT}")
  endif()
  set(gpu_properties ${host_properties} LABELS gpu)

  if(arg_WHOLE)
    # No skip expression for the host half: one skipped test must not hide the others' results.
    add_test(NAME ${target} COMMAND ${target} "--gtest_filter=-${gpu_filter}")
    add_test(NAME ${target}.gpu COMMAND ${target} "--gtest_filter=${gpu_filter}")
    set_tests_properties(${target} ${target}.gpu PROPERTIES
                         TIMEOUT 1200 WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
                         ENVIRONMENT "${STEPGRAPH_TEST_ENVIRONMENT}")
    set_tests_properties(${target}.gpu PROPERTIES LABELS gpu
                         SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\];0 tests from 0 test suites ran")
    return()
  endif()

  # Listing at test time: the build machine needs no GPU and no torch libraries to link a test.
  # Names by index or by the name generator: a printed value may hold addresses.
  set(discovery TEST_PREFIX "${target}." NO_PRETTY_VALUES DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  gtest_discover_tests(${target} ${discovery} TEST_FILTER "-${gpu_filter}"
                       PROPERTIES ${host_properties})
  gtest_discover_tests(${target} ${discovery} TEST_FILTER "${gpu_filter}"
                       PROPERTIES ${gpu_properties})
endfunction()
