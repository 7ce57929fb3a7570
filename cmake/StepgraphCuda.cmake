# Decides whether CUDA is built, and enables the language with C++20.
#
# Result: STEPGRAPH_HAS_CUDA (ON, OFF); with ON, the targets of find_package(CUDAToolkit).

set(CMAKE_CUDA_ARCHITECTURES
    "80-real;90-real;100-real;100-virtual"
    CACHE STRING "CUDA architectures to compile for")

# torch loads the shared CUDA runtime. A second, static copy would keep its own state (current
# device, last error), so nvcc must not add its default static one. The Python module, which is linked
# with no torch and keeps no state of the runtime between calls, takes the static one by its property
# STEPGRAPH_STATIC_CUDA_RUNTIME, so that it works beside every torch.
if(NOT DEFINED CMAKE_CUDA_RUNTIME_LIBRARY)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
endif()

set(stepgraph_cuda OFF)
set(stepgraph_cuda_summary "off")

if(NOT STEPGRAPH_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    # The toolkit's installer does not touch PATH.
    find_program(STEPGRAPH_NVCC nvcc PATHS /usr/local/cuda/bin)
    mark_as_advanced(STEPGRAPH_NVCC)
    if(STEPGRAPH_NVCC)
      set(CMAKE_CUDA_COMPILER "${STEPGRAPH_NVCC}" CACHE FILEPATH "CUDA compiler")
    endif()
  endif()

  if(STEPGRAPH_CUDA STREQUAL "AUTO")
    include(CheckLanguage)
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
      message(STATUS "stepgraph: no CUDA compiler found; building for the host only")
    endif()
  endif()

  if(CMAKE_CUDA_COMPILER OR NOT STEPGRAPH_CUDA STREQUAL "AUTO")
    enable_language(CUDA)
    find_package(CUDAToolkit 13.0 REQUIRED)
    set(stepgraph_cuda ON)
    set(stepgraph_cuda_summary "${CUDAToolkit_VERSION} (${CMAKE_CUDA_ARCHITECTURES})")

    # CMake before 3.26 does not know that nvcc has a C++20 mode. A plain -std=c++20 compile option
    # would lose against the -std=c++17 that CMake itself adds later on the command line.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
  endif()
endif()

# From here on the option is a plain switch as well: this hides AUTO, which the cache keeps and
# which if() would take for true.
set(STEPGRAPH_HAS_CUDA ${stepgraph_cuda})
set(STEPGRAPH_CUDA ${stepgraph_cuda})
