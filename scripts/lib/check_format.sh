#!/usr/bin/env bash
# clang-format 14 on every C++ and CUDA source that git knows or would add; --fix rewrites them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Other major versions format differently, so only this one judges.
tool=clang-format-14
command -v "$tool" > /dev/null || { echo "format: please install $tool" >&2; exit 1; }
mode=(--dry-run -Werror)
[ "${1:-}" = --fix ] && mode=(-i)

mapfile -t sources < <(git ls-files --cached --others --exclude-standard -- \
  '*.cpp' '*.hpp' '*.h' '*.cu' '*.cuh' | while read -r file; do
  [ -e "$file" ] && echo "$file"
done)
if [ "${#sources[@]}" -gt 0 ]; then
  "$tool" "${mode[@]}" "${sources[@]}"
fi
echo "format: ${#sources[@]} files checked"
