#!/usr/bin/env bash
# Runs every program and leaves what perf/results/<gpu>/ holds.
#
#   perf/run_all.sh BIN OUTDIR [part]...
#
# BIN: the build's perf directory, built here or carried here. OUTDIR: receives the JSON files.
# Parts: adam step replay update instantiate peers python on the GPU, host on the processors; all of
# them if none is named (a few minutes on an H200). PYTHON: the interpreter that has torch, and
# stepgraph for the part python (default python3). Runs all parts even when one failed or a
# measurement breaks a limit (limits.py); the exit status is then 1.
set -uo pipefail

[ $# -ge 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
perf=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=$(cd "$1" && pwd) || exit 2
mkdir -p "$2" && out=$(cd "$2" && pwd) || exit 2
shift 2
parts=("$@")
[ $# -gt 0 ] || parts=(adam step replay update instantiate host peers python)
python=${PYTHON:-python3}
failed=()

# step <name> <command>...
step() {
  local name=$1 start=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  if "$@"; then
    printf '== %s: %s s\n' "$name" "$((SECONDS - start))"
  else
    printf '== %s: FAILED\n' "$name"
    failed+=("$name")
  fi
}

bench() { step "$1" "$bin/$1" --benchmark_out="$out/$1.json"; }

peers() {
  local name=$1
  shift
  step "$name" "$python" "$perf/peers.py" --library "$bin/libstepgraph_peer.so" \
    --json "$out/$name.json" "$@"
}

for part in "${parts[@]}"; do
  case $part in
    adam | step | replay | update | instantiate) bench "${part}_bench" ;;
    host)
      bench host_bench
      peers peers_host --device cpu
      peers peers_host_bf16 --device cpu --dtype bf16
      ;;
    peers)
      peers peers_f32
      peers peers_bf16 --dtype bf16
      peers peers_f32_short --n-tensors 64 --numel 65536
      peers peers_gpt2_full --parameters gpt2-124m --step full
      peers peers_148x4096_full --n-tensors 148 --numel 4096 --step full
      ;;
    python) step fused_adam_bench "$python" "$perf/fused_adam_bench.py" --json "$out/fused_adam_bench.json" ;;
    *) printf 'no such part: %s\n' "$part" >&2; exit 2 ;;
  esac
done

step limits "$python" "$perf/limits.py" "$out"

[ ${#failed[@]} -eq 0 ] || { printf '\nfailed: %s\n' "${failed[*]}"; exit 1; }
