#!/usr/bin/env bash
# Fuzzes every reader of foreign bytes, guided by coverage:
#
#   scripts/check/fuzz.sh MINUTES [TARGET...]
#
# MINUTES is the time of each target (0.5 is half of one). Prints a table: executions, executions
# with made-up structures, edges of the program, crashes and processor time.
# Exits 1 after a crash. Its input stays in target/fuzz/TARGET/crashes.
#
# JOBS=N runs N targets at once (1). GEMMA_FUZZER=FILE runs a fuzzer that was built elsewhere.
# MINIMIZE=1 copies the smallest inputs that reach all that was reached to fuzz/corpus afterwards.
#
# Inputs that reach something new stay in target/fuzz/TARGET/corpus for the next time. A build needs
# a C++ compiler for libFuzzer, and no nightly toolchain: the coverage counters are LLVM's own. Only
# our crates have counters; their libraries are those of the tests. A use of freed memory goes
# unnoticed, because there is no sanitizer.
set -euo pipefail
cd "$(dirname "$0")/../.."

minutes=${1:?usage: scripts/check/fuzz.sh MINUTES [TARGET...]}
shift
seconds=$(awk -v m="$minutes" 'BEGIN { print int(60 * m) }')

fuzzer=${GEMMA_FUZZER:-}
if [ -z "$fuzzer" ]; then
  build=$PWD/target/fuzz/build
  mkdir -p "$build"
  # Cargo calls this for our crates and their build scripts, which get no counters.
  cat >"$build/rustc" <<'END'
#!/bin/sh
case " $* " in *" build_script_build "*) exec "$@" ;; esac
exec "$@" -Clto=off -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares
END
  chmod +x "$build/rustc"
  config=()
  for setting in opt-level=1 debug=0 debug-assertions=true overflow-checks=true; do
    for package in gemma gemma-{base,model,npu,quant,runtime,vulkan}; do
      config+=(--config "profile.release.package.$package.$setting")
    done
  done
  RUSTC_WORKSPACE_WRAPPER=$build/rustc CARGO_PROFILE_RELEASE_STRIP=none cargo build -q --release -p gemma --example fuzz \
    --no-default-features --features npu,fuzzing "${config[@]}"
  fuzzer=target/release/examples/fuzz
fi
fuzzer=$(realpath "$fuzzer")
targets=("$@")
if [ "$#" = 0 ]; then mapfile -t targets < <(GEMMA_FUZZ_TARGET=list "$fuzzer" 2>/dev/null); fi

# One directory for the files of readers, in memory.
memory=$(mktemp -d -p /dev/shm gemma-fuzz-XXXXXX)
trap 'rm -rf "$memory"' EXIT

# Limits of an input are 25 s and 2 GB. Inputs may be as long as the headers of these formats.
fuzz() { # TARGET OPTION...
  local target=$1 place=$PWD/target/fuzz/$1
  shift
  mkdir -p "$memory/$target" "$place/home"
  env -i PATH="$PATH" HOME="$place/home" GEMMA_FUZZ_TARGET="$target" \
    GEMMA_FUZZ_DIRECTORY="$memory/$target" nice -n 19 "$fuzzer" -timeout=25 -rss_limit_mb=2048 \
    -malloc_limit_mb=1024 -max_len=8192 -artifact_prefix="$place/crashes/" "$@"
}

run() { # TARGET
  local target=$1 place=$PWD/target/fuzz/$1 before code=0 TIMEFORMAT='%U %S'
  mkdir -p "$place/corpus" "$place/crashes" "fuzz/corpus/$target"
  before=$(find "$place/crashes" -type f | wc -l)
  { time fuzz "$target" "$place/corpus" "$PWD/fuzz/corpus/$target" -max_total_time="$seconds" \
    -len_control=20 -print_final_stats=1 >"$place/log" 2>&1 || code=$?; } 2>"$place/time"
  figure() { sed -n "s/^stat::$1: *//p" "$place/log" | tail -1; }
  local runs made edges processor new
  runs=$(figure number_of_executed_units) made=$(figure made_up_units)
  edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$place/log" | tail -1)
  processor=$(awk '{ print $1 + $2 }' "$place/time")
  new=$(($(find "$place/crashes" -type f | wc -l) - before))
  if [ "$code" != 0 ] && [ "$new" = 0 ]; then new=1; fi
  printf '%-14s %11s %11s %7s %7d %10.1f\n' "$target" "${runs:-0}" "${made:-0}" "${edges:-0}" \
    "$new" "$processor" | tee "$memory/$target.row"
  if [ "$code" != 0 ]; then
    grep -m 5 -E 'panicked|ERROR|SUMMARY|overflowed' "$place/log" >&2 || tail -5 "$place/log" >&2
    echo "the input is in $place/crashes, the whole report in $place/log" >&2
  fi
}

# The corpus of the repository stays small: at most 40 inputs and 60 kB a target.
minimize() { # TARGET
  local target=$1 place=$PWD/target/fuzz/$1 size total=0 count=0 input
  rm -rf "$place/merged" && mkdir -p "$place/merged"
  fuzz "$target" -set_cover_merge=1 "$place/merged" "$PWD/fuzz/corpus/$target" "$place/corpus" \
    >"$place/merge.log" 2>&1
  rm -rf "fuzz/corpus/$target" && mkdir -p "fuzz/corpus/$target"
  while read -r size input; do
    total=$((total + size)) count=$((count + 1))
    if [ "$count" -gt 40 ] || [ "$total" -gt 60000 ]; then break; fi
    cp "$input" "fuzz/corpus/$target/"
  done < <(find "$place/merged" -type f -printf '%s %p\n' | sort -n)
}

printf '%-14s %11s %11s %7s %7s %10s\n' target executions "made up" edges crashes "CPU s"
for target in "${targets[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n; done
  run "$target" &
done
wait
cat "$memory"/*.row | awk '
  { runs += $2; made += $3; crashes += $5; cpu += $6 }
  END {
    printf "%-14s %11d %11d %7s %7d %10.1f\n", "total", runs, made, "", crashes, cpu
    printf "%.2f CPU-hours\n", cpu / 3600
    exit (crashes > 0)
  }'
if [ "${MINIMIZE:-}" = 1 ]; then for target in "${targets[@]}"; do minimize "$target"; done; fi
