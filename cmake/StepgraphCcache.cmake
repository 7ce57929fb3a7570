# Compiles through ccache when it is there. The settings travel with the build rather than living in
# somebody's ccache.conf: results are shared between checkouts (base directory, no hashed working
# directory), and precompiled headers are cacheable (the sloppiness that ccache's manual asks for).
find_program(STEPGRAPH_CCACHE ccache)
mark_as_advanced(STEPGRAPH_CCACHE)

if(STEPGRAPH_CCACHE)
  set(stepgraph_launcher
      "${CMAKE_COMMAND}" -E env
      "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}"
      "CCACHE_NOHASHDIR=1"
      "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
      "${STEPGRAPH_CCACHE}")
  foreach(language IN ITEMS C CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER "${stepgraph_launcher}")
    endif()
  endforeach()
endif()
