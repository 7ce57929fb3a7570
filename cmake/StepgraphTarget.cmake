# stepgraph_target(<target>): the language level, warnings, numerics and sanitizers of a target that
# belongs to this project. Everything is PRIVATE: a project that links stepgraph keeps its own flags.

set(STEPGRAPH_SANITIZER_COMPILE_OPTIONS)
set(STEPGRAPH_SANITIZER_LINK_OPTIONS)
if(STEPGRAPH_SANITIZE)
  set(STEPGRAPH_SANITIZER_COMPILE_OPTIONS "-fsanitize=${STEPGRAPH_SANITIZE}"
                                          -fno-sanitize-recover=all -fno-omit-frame-pointer)
  set(STEPGRAPH_SANITIZER_LINK_OPTIONS "-fsanitize=${STEPGRAPH_SANITIZE}")
endif()

function(stepgraph_target target)
  set_target_properties(
    ${target}
    PROPERTIES CXX_STANDARD 20
               CXX_STANDARD_REQUIRED ON
               CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON)

  # Numbers. A multiply and an add fuse only where the source says fma, on both processors, so that
  # the host executor is a bit-exact oracle of the device. The last two options let the host loops
  # vectorise; neither changes a result, since nothing here reads errno or traps.
  set(cxx_options -ffp-contract=off -fno-math-errno -fno-trapping-math)
  set(cuda_options -fmad=false -prec-div=true -prec-sqrt=true -ftz=false
                   -Xcompiler=-ffp-contract=off)

  list(APPEND cxx_options -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor
       -Woverloaded-virtual)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # g++ 12 takes concatenations of std::string for overlapping copies (GCC bug 105651).
    list(APPEND cxx_options -Wno-restrict)
  endif()
  # nvcc's generated host code trips -Wpedantic and -Wconversion; the sources do not.
  list(APPEND cuda_options -Xcompiler=-Wall,-Wextra,-Wshadow --expt-relaxed-constexpr)
  if(STEPGRAPH_WERROR)
    # A stale precompiled header costs time and is rebuilt; it is no defect of the source.
    list(APPEND cxx_options -Werror -Wno-error=invalid-pch)
    if(STEPGRAPH_SANITIZE)
      # GCC's flow warnings see the instrumentation and misjudge it.
      list(APPEND cxx_options -Wno-error=maybe-uninitialized)
    endif()
    list(APPEND cuda_options --Werror=all-warnings -Xcompiler=-Werror)
  endif()

  target_compile_options(
    ${target}
    PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${cxx_options};${STEPGRAPH_SANITIZER_COMPILE_OPTIONS}>"
            "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>"
            # Lets profilers and compute-sanitizer name source lines; the generated code is the same.
            "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:RelWithDebInfo>>:-lineinfo>")

  # A static library passes this on by itself: whoever links sanitized objects needs the runtime.
  if(STEPGRAPH_SANITIZER_LINK_OPTIONS)
    target_link_options(${target} PUBLIC ${STEPGRAPH_SANITIZER_LINK_OPTIONS})
  endif()
endfunction()
