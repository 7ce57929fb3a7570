# shellcheck shell=bash
# Sourced by scripts/test, scripts/demo and .ci/run: makes a machine ready to build and test.
#
#   stepgraph_prepare build|test|ci
#
# installs the Debian packages that are missing, builds a Python environment outside the tree, and
# exports
#   STEPGRAPH_PYTHON       interpreter with matplotlib, pytest and nanobind, where they could be installed
#   STEPGRAPH_TORCH_DIR    torch's directory with include/ and lib/, or empty
#   STEPGRAPH_TORCH_LIBRARIES   what LD_LIBRARY_PATH needs for that interpreter to import torch, or empty
#   STEPGRAPH_CUOBJDUMP, STEPGRAPH_NVDISASM   disassemblers for tests, where they could be installed
#   CUDACXX                nvcc, when a toolkit is present
# It prints only what it does; on a machine that is ready it prints nothing.
#
# Settings: STEPGRAPH_CACHE (where the environment lives), STEPGRAPH_TORCH=OFF (no torch),
# STEPGRAPH_OFFLINE=1 (install nothing).

stepgraph_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

stepgraph_say() { printf 'stepgraph: %s\n' "$*" >&2; }
stepgraph_fail() { stepgraph_say "$*"; exit 1; }

stepgraph_has_header() {
  local prefix prefixes=${CMAKE_PREFIX_PATH:-}
  for prefix in ${prefixes//[:;]/ } ${CONDA_PREFIX:-} /usr /usr/local; do
    [ -e "$prefix/include/$1" ] && return 0
  done
  return 1
}

# Prints the Debian packages that stand for what this machine lacks. Probing for the thing itself
# rather than for the package accepts tools that came another way.
stepgraph_missing_packages() {
  local profile=$1 command header
  while read -r command package; do
    command -v "$command" > /dev/null || echo "$package"
  done <<< 'g++ g++
cmake cmake
ninja ninja-build
git git
python3 python3
ccache ccache'
  while read -r header package; do
    stepgraph_has_header "$header" || echo "$package"
  done <<< 'CLI/CLI.hpp libcli11-dev
nlohmann/json.hpp nlohmann-json3-dev
fmt/core.h libfmt-dev'
  if [ "$profile" != build ]; then
    stepgraph_has_header gtest/gtest.h || echo libgtest-dev
    stepgraph_has_header gmock/gmock.h || echo libgmock-dev
    stepgraph_has_header benchmark/benchmark.h || echo libbenchmark-dev
  fi
  if [ "$profile" = ci ]; then
    command -v clang-format-14 > /dev/null || echo clang-format-14
  fi
  if command -v python3 > /dev/null; then
    python3 -c 'import ensurepip' 2> /dev/null || echo python3-venv
    [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
      echo python3-dev
  fi
}

# What the scripts can do without: time, benchmarks, plots, the Python module, the format check (which
# complains itself).
stepgraph_optional_packages='ccache|libbenchmark-dev|python3-venv|python3-dev|clang-format-14'

stepgraph_install_packages() {
  local missing needed log as_root=()
  missing=$(stepgraph_missing_packages "$1")
  [ -n "$missing" ] || return 0
  needed=$(grep -vxE "$stepgraph_optional_packages" <<< "$missing" | tr '\n' ' ') || true
  missing=${missing//$'\n'/ }
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  if [ "${STEPGRAPH_OFFLINE:-0}" = 1 ] || ! command -v apt-get > /dev/null ||
    ! "${as_root[@]}" true 2> /dev/null; then
    [ -z "$needed" ] || stepgraph_fail "please install what these Debian packages hold: $missing"
    stepgraph_say "going on without $missing"
    return 0
  fi
  stepgraph_say "installing Debian packages: $missing"
  log=$(mktemp)
  # shellcheck disable=SC2086  # one word a package
  if ! { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends $missing; } < /dev/null > "$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    [ -z "$needed" ] || stepgraph_fail "apt-get failed; please install: $missing"
    stepgraph_say "apt-get failed; going on without $missing"
    return 0
  fi
  rm -f "$log"
}

stepgraph_has_gpu() { [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; }

# Builds the environment, once for each content of the requirement files; the stamp is written last,
# so that an interrupted build is started over. Prints nothing but errors when it is there already.
stepgraph_build_venv() {
  local venv=$1 stamp=$1/.complete
  shift
  # Two scripts may start at once.
  exec 9> "$venv.lock"
  flock 9
  if [ ! -e "$stamp" ]; then
    stepgraph_say "building the Python environment $venv"
    rm -rf "$venv"
    "$@" || { exec 9>&-; return 1; }
    touch "$stamp"
  fi
  exec 9>&-
}

stepgraph_fill_venv() {
  local venv=$1 torch=$2
  local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  local site=()
  # The host's torch stays where it is; the environment only adds to it.
  [ "$torch" = system ] && site=(--system-site-packages)
  python3 -m venv "${site[@]}" "$venv" || return 1
  "${pip[@]}" -r "$stepgraph_root/scripts/requirements.txt" || return 1
  "${pip[@]}" --no-deps -r "$stepgraph_root/scripts/requirements-disassembly.txt" || return 1
  case $torch in
    gpu) "${pip[@]}" -r "$stepgraph_root/scripts/requirements-torch-gpu.txt" ;;
    host) "${pip[@]}" --no-deps -r "$stepgraph_root/scripts/requirements-torch-host.txt" || return 1
      stepgraph_can_import_torch "$venv/bin/python" && return
      stepgraph_say "this machine lacks libraries that torch loads: installing them all"
      "${pip[@]}" -r "$stepgraph_root/scripts/requirements-torch-gpu.txt" ;;
  esac
}

stepgraph_can_import_torch() {
  LD_LIBRARY_PATH=$(stepgraph_join "$(stepgraph_toolkit_libraries)" "${LD_LIBRARY_PATH:-}") \
    "$1" -c 'import torch' 2> /dev/null
}

# Search paths with colons between those that are not empty: an empty part would be the directory
# that somebody happens to be in.
stepgraph_join() {
  local IFS=: part parts=()
  for part in "$@"; do
    [ -z "$part" ] || parts+=("$part")
  done
  echo "${parts[*]}"
}

# Where the CUDA toolkit has its libraries, or nothing.
stepgraph_toolkit_libraries() {
  local nvcc directory
  nvcc=$(command -v "${CUDACXX:-nvcc}") || nvcc=/usr/local/cuda/bin/nvcc
  directory=$(dirname "$(dirname "$(readlink -f "$nvcc")")")/lib64
  [ ! -d "$directory" ] || echo "$directory"
}

stepgraph_locate_torch() {
  "$1" -c '
import importlib.util
spec = importlib.util.find_spec("torch")
print(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else "")'
}

stepgraph_python_environment() {
  local torch=host key venv tool path
  if [ "${STEPGRAPH_TORCH:-AUTO}" = OFF ]; then
    torch=none
  elif [[ $(python3 -c 'import importlib.metadata as m; print(m.version("torch"))' 2> /dev/null) \
    == 2.11.* ]]; then
    torch=system
  elif stepgraph_has_gpu; then
    torch=gpu
  fi
  key=$({ echo "$torch"; python3 -c 'import sys; print(sys.version, sys.prefix)'
    cat "$stepgraph_root"/scripts/requirements*.txt; } | sha256sum | cut -c1-12)
  venv=${STEPGRAPH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stepgraph}/venv-$key
  mkdir -p "$(dirname "$venv")"

  STEPGRAPH_PYTHON=$(command -v python3)
  if [ -e "$venv/.complete" ] ||
    { [ "${STEPGRAPH_OFFLINE:-0}" != 1 ] &&
      stepgraph_build_venv "$venv" stepgraph_fill_venv "$venv" "$torch"; }; then
    STEPGRAPH_PYTHON=$venv/bin/python
  elif [ "$torch" = system ] || [ "${STEPGRAPH_OFFLINE:-0}" = 1 ]; then
    stepgraph_say "going on with python3 as it is"
  else
    stepgraph_fail "could not build the Python environment; STEPGRAPH_OFFLINE=1 goes on without it"
  fi

  STEPGRAPH_TORCH_DIR=
  [ "$torch" = none ] || STEPGRAPH_TORCH_DIR=$(stepgraph_locate_torch "$STEPGRAPH_PYTHON")
  # Not where torch came with CUDA libraries of its own.
  STEPGRAPH_TORCH_LIBRARIES=
  if [ "$torch" = host ] &&
    ! compgen -G "$venv/lib/python3*/site-packages/nvidia/*/lib/libcublas.so*" > /dev/null; then
    STEPGRAPH_TORCH_LIBRARIES=$(stepgraph_toolkit_libraries)
  fi
  for tool in cuobjdump nvdisasm; do
    path=$(compgen -G "$venv/lib/python3*/site-packages/nvidia/cu13/bin/$tool" | head -n 1) ||
      path=$(command -v "$tool") || path=
    printf -v "STEPGRAPH_${tool^^}" '%s' "$path"
  done
  export STEPGRAPH_PYTHON STEPGRAPH_TORCH_DIR STEPGRAPH_TORCH_LIBRARIES
  export STEPGRAPH_CUOBJDUMP STEPGRAPH_NVDISASM
}

stepgraph_prepare() {
  stepgraph_install_packages "$1"
  stepgraph_python_environment
  # The toolkit's installer does not touch PATH.
  if [ -z "${CUDACXX:-}" ] && ! command -v nvcc > /dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then
    export CUDACXX=/usr/local/cuda/bin/nvcc
  fi
}

# The GPU of this machine; without one, sm_90, so that what is compiled does not depend on chance.
stepgraph_cuda_architectures() {
  if stepgraph_has_gpu; then echo native; else echo 90-real; fi
}

# stepgraph_configure <build directory> [cmake argument]...
stepgraph_configure() {
  local build=$1
  shift
  cmake -S "$stepgraph_root" -B "$build" -G Ninja \
    -DSTEPGRAPH_PYTHON="$STEPGRAPH_PYTHON" -DSTEPGRAPH_TORCH_DIR="$STEPGRAPH_TORCH_DIR" "$@"
}

# Whether <build directory> holds the Python module and the environment has torch to test it with.
stepgraph_has_python_module() {
  compgen -G "$1/frontends/python/stepgraph/_core*.so" > /dev/null && [ -n "$STEPGRAPH_TORCH_DIR" ]
}

# stepgraph_run_python <build directory> [argument]...: Python with the package of that build.
stepgraph_run_python() {
  local build
  build=$(cd "$1" && pwd)
  shift
  STEPGRAPH_BUILD_DIR=$build PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=$(stepgraph_join "$build/frontends/python" "${PYTHONPATH:-}") \
    LD_LIBRARY_PATH=$(stepgraph_join "$STEPGRAPH_TORCH_LIBRARIES" "${LD_LIBRARY_PATH:-}") \
    "$STEPGRAPH_PYTHON" "$@"
}
