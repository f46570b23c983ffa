#!/usr/bin/env bash
# Fuzzes every reader of foreign bytes, guided by coverage: scripts/fuzz.sh MINUTES [TARGET...]
#
# MINUTES is the time of each target (0.5 is half of one). A line a target: executions, coverage,
# crashes. Exits 1 where one crashed; its input stays in target/fuzz/TARGET, and is shown. Inputs
# that reached something new stay in target/fuzz/TARGET/corpus for the next time; fuzz/corpus holds
# small seeds. Needs a C++ compiler for libFuzzer, and no nightly toolchain: the compiler's coverage
# counters are LLVM's own. Memory that is used after it is freed goes unnoticed without a sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:?usage: scripts/fuzz.sh MINUTES [TARGET...]}
shift
all="safetensors artifact config generation gguf gguf-split tokenizer template grammar settings
  recipe batch server costs xclbin transactions"
read -ra targets <<<"${*:-${all//$'\n'/ }}"
seconds=$(awk -v m="$minutes" 'BEGIN { print int(60 * m) }')

host=$(rustc -vV | sed -n 's/^host: //p')
flags="-Cpasses=sancov-module --cfg fuzzing"
for option in level=4 inline-8bit-counters pc-table trace-compares; do
  flags+=" -Cllvm-args=-sanitizer-coverage-$option"
done
# A target of its own: build scripts and macros run here, and have nobody to count for.
RUSTFLAGS=$flags cargo build -q --manifest-path fuzz/Cargo.toml \
  --target-dir target/fuzz/build --target "$host"
fuzzer=$PWD/target/fuzz/build/$host/debug/gemma-fuzz

failed=0
for target in "${targets[@]}"; do
  place=$PWD/target/fuzz/$target
  mkdir -p "$place/corpus" "$place/crashes" "$place/home"
  before=$(find "$place/crashes" -type f | wc -l)
  seeds=()
  if [ -d "fuzz/corpus/$target" ]; then seeds=("$PWD/fuzz/corpus/$target"); fi
  # No input may take 10 s or 2 GB; one may be as long as these formats' headers are.
  code=0
  env -i PATH="$PATH" HOME="$place/home" GEMMA_FUZZ_TARGET="$target" nice -n 19 \
    "$fuzzer" "$place/corpus" "${seeds[@]}" -max_total_time="$seconds" -print_final_stats=1 \
    -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=1024 -max_len=8192 -len_control=20 \
    -artifact_prefix="$place/crashes/" >"$place/log" 2>&1 || code=$?
  rm -rf /dev/shm/gemma-fuzz-*
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$place/log")
  edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$place/log" | tail -1)
  new=$(($(find "$place/crashes" -type f | wc -l) - before))
  printf '%-14s %10s executions  %6s edges  %d new crashes\n' \
    "$target" "${runs:-0}" "${edges:-0}" "$new"
  if [ "$code" != 0 ]; then
    failed=1
    grep -m 5 -E 'panicked|ERROR|SUMMARY|overflowed' "$place/log" >&2 || tail -5 "$place/log" >&2
    echo "the input is in $place/crashes, the whole report in $place/log" >&2
  fi
done
exit "$failed"
