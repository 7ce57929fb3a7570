#!/usr/bin/env bash
# The layer rule, on the sources as they are: each layer includes only those below it.
#   kernels/include/stepgraph/math   values only: no CUDA runtime, no torch, nothing of a layer above
#   kernels                          nothing of graph_runtime, no torch, no Python
#   graph_runtime                    no torch, no Python; no CUDA in headers outside cuda/
# Frontends may include anything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

failed=0

# forbid <why> <pattern of the included name> <path>...
forbid() {
  local why=$1 pattern=$2 path existing=() hits
  shift 2
  for path in "$@"; do
    [ -e "$path" ] && existing+=("$path")
  done
  [ "${#existing[@]}" -gt 0 ] || return 0
  if hits=$(grep -rnE --include='*.hpp' --include='*.h' --include='*.cuh' --include='*.cpp' \
    --include='*.cu' "^[[:space:]]*#[[:space:]]*include[[:space:]]*[<\"]($pattern)" "${existing[@]}"); then
    printf 'layer rule: %s\n%s\n' "$why" "$hits"
    failed=1
  fi
}

torch='torch/|ATen/|c10/|caffe2/'
python='Python\.h|pybind11/|nanobind/'
cuda='cuda|.*/cuda_[^/]*|cooperative_groups|cub/|thrust/|nv/|.*stepgraph/cuda/|.*\.cuh'
# The number formats' conversions are plain functions of values.
math_cuda='cuda_runtime|cuda\.h|cuda/|cooperative_groups|cub/|thrust/|.*stepgraph/cuda/|stepgraph/kernels/'

# Names of graph_runtime's own headers, whatever they are today.
runtime_headers=
if [ -d graph_runtime/include ]; then
  runtime_headers=$(cd graph_runtime/include && find . -name '*.hpp' | sed 's|^\./||; s|[.]|\\.|g' |
    paste -sd'|')
fi

forbid 'element math holds values only' "$math_cuda|$torch|$python" kernels/include/stepgraph/math
forbid 'kernels know no framework' "$torch|$python" kernels
if [ -n "$runtime_headers" ]; then
  forbid 'kernels know nothing of graph_runtime' "$runtime_headers" kernels
fi
forbid 'graph_runtime knows no framework' "$torch|$python" graph_runtime
# The umbrella names cuda/ behind its own #if; tests/headers compiles it without CUDA's headers.
mapfile -t host_headers < <(find graph_runtime/include/stepgraph -maxdepth 1 -name '*.hpp' \
  ! -name stepgraph.hpp 2> /dev/null)
forbid 'host headers include no CUDA header' "$cuda" "${host_headers[@]}"
mapfile -t host_sources < <(find graph_runtime/src kernels/src/host -maxdepth 1 -name '*.cpp' 2> /dev/null)
forbid 'host sources include no CUDA header' "$cuda" "${host_sources[@]}"

[ "$failed" = 0 ] && echo 'layer rule: kept'
exit "$failed"
