#include "chunk_loops.hpp"

namespace stepgraph::host {
namespace {

chunk_loops choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return chunk_loops_avx512();
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return chunk_loops_avx2();
#endif
  return chunk_loops_baseline();
}

}  // namespace

const chunk_loops& fastest_chunk_loops() {
  static const chunk_loops loops = choose();
  return loops;
}

}  // namespace stepgraph::host
