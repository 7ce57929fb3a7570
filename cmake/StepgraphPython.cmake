# Decides whether the Python module is built, and finds nanobind in the environment of the
# interpreter that it is built for.
#
# In:      STEPGRAPH_PYTHON_MODULE (AUTO, ON, OFF), STEPGRAPH_PYTHON (the interpreter; else the one
#          that CMake finds)
# Result:  STEPGRAPH_HAS_PYTHON_MODULE (ON, OFF); with ON, nanobind_add_module

set(stepgraph_python_module OFF)
set(stepgraph_python_summary "off")

if(NOT STEPGRAPH_PYTHON_MODULE STREQUAL "OFF")
  if(STEPGRAPH_PYTHON AND NOT Python_EXECUTABLE)
    set(Python_EXECUTABLE "${STEPGRAPH_PYTHON}")
  endif()
  set(components Interpreter Development.Module)
  if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.26)
    find_package(Python 3.10 QUIET COMPONENTS ${components} OPTIONAL_COMPONENTS Development.SABIModule)
  else()
    find_package(Python 3.10 QUIET COMPONENTS ${components})
    # Older versions do not know the component. Where modules link no Python library, as on Linux,
    # the stable ABI takes nothing but a definition.
    if(Python_FOUND AND NOT TARGET Python::SABIModule)
      add_library(Python::SABIModule INTERFACE IMPORTED)
    endif()
  endif()
  set(stepgraph_nanobind_dir "")
  if(Python_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
      OUTPUT_VARIABLE stepgraph_nanobind_dir
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(stepgraph_nanobind_dir)
    find_package(nanobind CONFIG REQUIRED PATHS "${stepgraph_nanobind_dir}" NO_DEFAULT_PATH)
    set(stepgraph_python_module ON)
    set(stepgraph_python_summary "${Python_VERSION}")
  elseif(STEPGRAPH_PYTHON_MODULE STREQUAL "ON")
    message(FATAL_ERROR "stepgraph: the Python module takes Python 3.10 with its headers and "
                        "nanobind, in the environment of STEPGRAPH_PYTHON ('${Python_EXECUTABLE}')")
  endif()
endif()
# As for STEPGRAPH_CUDA: if(AUTO) would be true.
set(STEPGRAPH_HAS_PYTHON_MODULE ${stepgraph_python_module})
set(STEPGRAPH_PYTHON_MODULE ${stepgraph_python_module})
