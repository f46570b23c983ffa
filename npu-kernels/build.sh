#!/usr/bin/env bash
# Builds the arrays on a machine with mlir-aie and Peano. Their environment must be set: aiecc.py, PEANO_INSTALL_DIR, MLIR_AIE_INSTALL_DIR.
#
#   npu-kernels/build.sh [OUT]          writes both arrays and their manifest to OUT (default: ~/.local/share/gemma/npu)
#   npu-kernels/build.sh --manifest     only updates manifest.txt from the sources
#
# This project has only run --manifest, because it has neither the tools nor the device for the rest.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")"
# Resolves a path relative to the caller's directory.
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$from/$1" ;; esac; }

manifest() {
  echo "abi $(sed -n 's/^constexpr uint32_t ABI = \([0-9]*\);.*/\1/p' flash_partial.h)"
  echo "object $(sed -n 's/^constexpr unsigned OBJECT = \([0-9]*\);.*/\1/p' flash_partial.h)"
  for d in 128 256; do
    echo "head_dim $d rows $((4096 / d)) keys $((2048 / d)) result $(((4096 + 2 * 32 + 16) * 4))"
  done
  for source in design.py flash_partial.cc flash_partial.h; do
    echo "source $source $(sha256sum <"$source" | cut -c1-64)"
  done
}

case "${1:-}" in
  --manifest)
    manifest >manifest.txt
    exit
    ;;
esac

manifest | cmp -s - manifest.txt || { echo "manifest.txt is stale: run build.sh --manifest" >&2; exit 1; }
out=$(absolute "${1:-${XDG_DATA_HOME:-$HOME/.local/share}/gemma/npu}")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for d in 128 256; do
  "$PEANO_INSTALL_DIR/bin/clang++" --target=aie2-none-unknown-elf -std=c++20 -O2 -DNDEBUG -I"$MLIR_AIE_INSTALL_DIR/include" \
    -I. -DHEAD_DIM=$d -c flash_partial.cc -o "$work/flash_partial_$d.o"
  python3 design.py $d >"$work/flash_partial_$d.mlir"
  (cd "$work" && aiecc.py --aie-generate-xclbin --no-compile-host --no-xchesscc --no-xbridge --peano "$PEANO_INSTALL_DIR" \
    --xclbin-name="$out/flash_partial_$d.xclbin" "flash_partial_$d.mlir")
done
{
  cat manifest.txt
  for d in 128 256; do echo "xclbin flash_partial_$d.xclbin $(sha256sum <"$out/flash_partial_$d.xclbin" | cut -c1-64)"; done
} >"$out/manifest.txt"
echo "built into $out"
