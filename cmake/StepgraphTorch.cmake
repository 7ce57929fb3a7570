# Finds LibTorch inside an installed torch wheel, without TorchConfig.cmake: that file enables the
# CUDA language with its own architecture list, edits CMAKE_CXX_FLAGS, and links libtorch_cuda.so,
# which needs every CUDA library there is.
#
# In:      STEPGRAPH_TORCH (AUTO, ON, OFF), STEPGRAPH_TORCH_DIR (holds include/ and lib/),
#          STEPGRAPH_PYTHON (a python that has torch; asked when no directory is given,
#          else the scripts' environment, else python3)
# Result:  STEPGRAPH_HAS_TORCH (ON, OFF); with ON, targets
#            stepgraph::torch       headers, libtorch_cpu.so, libc10.so
#            stepgraph::torch_cuda  the above and libc10_cuda.so (streams, guards); with CUDA only
#          function stepgraph_torch_pch(<target>)
#
# A program that wants CUDA tensors loads libtorch_cuda.so at run time; linking it here would keep
# the program from starting on a machine without CUDA libraries.

set(STEPGRAPH_TORCH_DIR "" CACHE PATH "Directory of torch that holds include/ and lib/")
set(STEPGRAPH_PYTHON "" CACHE FILEPATH "Python interpreter to ask for torch")

function(stepgraph_find_torch result)
  set(directory "${STEPGRAPH_TORCH_DIR}")
  if(NOT directory)
    # The environment that scripts/lib/environment.sh built, newest first.
    set(cache "$ENV{STEPGRAPH_CACHE}")
    if(NOT cache AND NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
      set(cache "$ENV{XDG_CACHE_HOME}/stepgraph")
    elseif(NOT cache)
      set(cache "$ENV{HOME}/.cache/stepgraph")
    endif()
    file(GLOB environments "${cache}/venv-*/.complete")
    if(STEPGRAPH_PYTHON)
      set(python "${STEPGRAPH_PYTHON}")
    elseif(environments)
      list(GET environments 0 python)
      foreach(candidate IN LISTS environments)
        if("${candidate}" IS_NEWER_THAN "${python}")
          set(python "${candidate}")
        endif()
      endforeach()
      string(REGEX REPLACE "[.]complete$" "bin/python" python "${python}")
    else()
      find_program(STEPGRAPH_PYTHON3 python3)
      mark_as_advanced(STEPGRAPH_PYTHON3)
      set(python "${STEPGRAPH_PYTHON3}")
    endif()
    if(python)
      # find_spec locates the package without importing it: the host half cannot be imported.
      execute_process(
        COMMAND "${python}" -c [[
import importlib.util
spec = importlib.util.find_spec("torch")
print(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else "")]]
        OUTPUT_VARIABLE directory
        OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endif()
  if(directory AND NOT EXISTS "${directory}/lib/libtorch_cpu.so")
    message(WARNING "stepgraph: ${directory} holds no lib/libtorch_cpu.so")
    set(directory "")
  endif()
  set(${result} "${directory}" PARENT_SCOPE)
endfunction()

function(stepgraph_import_torch directory)
  set(library_dirs "${directory}/lib")
  # The CUDA libraries of the pip wheels lie beside torch; libtorch_cpu.so needs two of them.
  file(GLOB nvidia_dirs "${directory}/../nvidia/*/lib")
  foreach(nvidia_dir IN LISTS nvidia_dirs)
    get_filename_component(nvidia_dir "${nvidia_dir}" ABSOLUTE)
    list(APPEND library_dirs "${nvidia_dir}")
  endforeach()

  add_library(stepgraph_torch INTERFACE)
  add_library(stepgraph::torch ALIAS stepgraph_torch)
  target_include_directories(
    stepgraph_torch SYSTEM INTERFACE "${directory}/include"
                                     "${directory}/include/torch/csrc/api/include")
  # By name, since for a path CMake would order the run-time search itself, and warn that torch
  # brings a libgomp of its own. Never as-needed: libtorch_cpu.so registers operators when loaded.
  target_link_libraries(stepgraph_torch INTERFACE "-Wl,--push-state,--no-as-needed" "-ltorch_cpu"
                                                  "-lc10" "-Wl,--pop-state")
  target_link_options(stepgraph_torch INTERFACE "-L${directory}/lib")
  target_link_options(stepgraph_torch INTERFACE "-Wl,--allow-shlib-undefined")
  foreach(library_dir IN LISTS library_dirs)
    target_link_options(stepgraph_torch INTERFACE "-Wl,-rpath,${library_dir}"
                        "-Wl,-rpath-link,${library_dir}")
  endforeach()

  if(STEPGRAPH_HAS_CUDA AND EXISTS "${directory}/lib/libc10_cuda.so")
    add_library(stepgraph_torch_cuda INTERFACE)
    add_library(stepgraph::torch_cuda ALIAS stepgraph_torch_cuda)
    target_link_libraries(stepgraph_torch_cuda INTERFACE stepgraph::torch CUDA::cudart
                                                         "-lc10_cuda")
  endif()
endfunction()

# stepgraph_torch_pch(<target>): compile <target> with torch's headers precompiled once for all.
# Call it after stepgraph_target(<target>): GCC accepts the header only under equal flags.
function(stepgraph_torch_pch target)
  if(NOT TARGET stepgraph_torch_headers)
    set(holder "${PROJECT_BINARY_DIR}/stepgraph_torch_headers.cpp")
    file(CONFIGURE OUTPUT "${holder}" CONTENT "// Compiled for its precompiled header.\n")
    add_library(stepgraph_torch_headers OBJECT "${holder}")
    stepgraph_target(stepgraph_torch_headers)
    stepgraph_share_torch_headers(stepgraph_torch_headers)
    target_link_libraries(stepgraph_torch_headers PRIVATE stepgraph::torch OpenMP::OpenMP_CXX)
    target_precompile_headers(stepgraph_torch_headers PRIVATE <torch/torch.h>)
  endif()
  stepgraph_share_torch_headers(${target})
  target_link_libraries(${target} PRIVATE stepgraph::torch OpenMP::OpenMP_CXX)
  target_precompile_headers(${target} REUSE_FROM stepgraph_torch_headers)
endfunction()

# -fpie (CMake's choice for programs) and -fPIC do not share a precompiled header;
# -fpch-preprocess makes the result cacheable by ccache.
function(stepgraph_share_torch_headers target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fPIC;-fpch-preprocess>")
endfunction()

set(stepgraph_torch OFF)
set(stepgraph_torch_summary "off")
if(NOT STEPGRAPH_TORCH STREQUAL "OFF")
  stepgraph_find_torch(stepgraph_torch_dir)
  if(stepgraph_torch_dir)
    stepgraph_import_torch("${stepgraph_torch_dir}")
    set(stepgraph_torch ON)
    set(stepgraph_torch_summary "${stepgraph_torch_dir}")
  elseif(STEPGRAPH_TORCH STREQUAL "ON")
    message(FATAL_ERROR "stepgraph: torch not found; set STEPGRAPH_TORCH_DIR or STEPGRAPH_PYTHON")
  endif()
endif()
# As for STEPGRAPH_CUDA: if(AUTO) would be true.
set(STEPGRAPH_HAS_TORCH ${stepgraph_torch})
set(STEPGRAPH_TORCH ${stepgraph_torch})
