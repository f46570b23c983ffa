#!/usr/bin/env bash
# Runs the tests under a detector of undefined behaviour:
#   scripts/check/sanitize.sh address|memcheck [SUITE[:FILTER]...]
#
# address   AddressSanitizer: accesses outside an allocation, or after its end.
# memcheck  Valgrind: the same, and decisions on bytes that were never written.
#
# A suite is a folder of tests/, or `lib` for the unit tests of src/ and `lib_base` for those of
# crates/base. A filter selects tests of its binary. All lanes also have the checks of a debug
# build: overflow, debug_assert, and the standard library's own checks of unsafe calls. Only our
# crates are instrumented. Their libraries come from target/release, and their heap memory is
# watched too. Exits with 1 after a failed test or a report; the reports stay in
# target/sanitize/LANE/reports.
#
# SANITIZE_BINARIES=DIR runs the binaries in DIR, which an earlier run built, and needs no compiler.
# The checkout must be at the path where they were built, and DIR in it. SANITIZE_BUILD=1 only
# builds; the binaries are then in target/sanitize/LANE/binaries.
set -euo pipefail
cd "$(dirname "$0")/../.."

lane=${1:?usage: scripts/check/sanitize.sh address|memcheck [SUITE[:FILTER]...]}
shift
place=$PWD/target/sanitize/$lane
binaries=${SANITIZE_BINARIES:-$place/binaries}
suites=("$@")
case $lane in
  address)
    flag=-Zsanitizer=address
    if [ $# = 0 ]; then suites=(lib lib_{base,model,npu,quant,runtime,vulkan} text model gguf quantize batch); fi
    # A leak is not undefined behaviour. The shadow memory needs unlimited address space.
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=$place/reports/report
    ;;
  memcheck)
    flag=
    # Without `grammar` and `cli`: rustix looks for the vDSO, which Valgrind hides.
    if [ $# = 0 ]; then suites=(lib_base:compute lib_base:tensor lib_base:kv lib_model:checkpoint text:linear); fi
    if ! command -v valgrind >/dev/null; then
      echo "scripts/check/sanitize.sh: valgrind is not installed (apt-get install valgrind)" >&2
      exit 1
    fi
    ;;
  *)
    echo "scripts/check/sanitize.sh: there is no lane '$lane'" >&2
    exit 1
    ;;
esac

# Builds the binaries of the requested suites.
build() {
  mkdir -p "$place/binaries"
  # Cargo calls this for the crates of the workspace. The stable compiler accepts -Z with the
  # bootstrap variable. Libraries without the sanitizer have the same ABI.
  cat >"$place/rustc" <<'END'
#!/bin/sh
if [ -n "$SANITIZE_FLAG" ]; then
  export RUSTC_BOOTSTRAP=1
  exec "$@" "$SANITIZE_FLAG" -Clto=off -Cunsafe-allow-abi-mismatch=sanitizer
fi
exec "$@"
END
  chmod +x "$place/rustc"
  local wanted=()
  for suite in $(printf '%s\n' "${suites[@]%%:*}" | sed 's/^lib_.*/lib/' | sort -u); do
    if [ "$suite" = lib ]; then wanted+=(--lib); else wanted+=(--test "$suite"); fi
  done
  local config=()
  for setting in opt-level=1 debug=0 debug-assertions=true overflow-checks=true; do
    for package in gemma gemma-{base,model,npu,quant,runtime,vulkan}; do
      config+=(--config "profile.release.package.$package.$setting")
    done
  done
  SANITIZE_FLAG=$flag RUSTC_WORKSPACE_WRAPPER=$place/rustc CARGO_PROFILE_RELEASE_DEBUG=0 CARGO_PROFILE_RELEASE_STRIP=none \
    "${CARGO:-cargo}" test --release --no-run "${config[@]}" "${wanted[@]}" 2>&1 |
    tee "$place/build.log"
  # The last lines name the binaries: Executable tests/text/main.rs (target/release/deps/text-...)
  sed -n 's/^ *Executable .*(\(.*\))$/\1/p' "$place/build.log" | while read -r built; do
    name=$(basename "$built")
    name=${name%-*}
    cp "$built" "$place/binaries/${name/#gemma/lib}"
  done
}

if [ -z "${SANITIZE_BINARIES:-}" ]; then build; fi
if [ "${SANITIZE_BUILD:-}" = 1 ]; then exit; fi

# Some tests start the program by this variable, which Cargo would set.
export CARGO_BIN_EXE_gemma=$PWD/target/release/gemma
rm -rf "$place/reports"
mkdir -p "$place/reports"
run=()
if [ "$lane" = memcheck ]; then
  # Valgrind supports AVX2 and hides newer sets, so the kernels are those of AVX2.
  run=(valgrind -q --log-file="$place/reports/report.%p")
fi
passed=0 failed=0
for suite in "${suites[@]}"; do
  filter=()
  if [[ $suite == *:* ]]; then filter=("${suite#*:}"); fi
  log=$place/reports/${suite/:/-}.log
  code=0
  "${run[@]}" "$binaries/${suite%%:*}" "${filter[@]}" >"$log" 2>&1 || code=$?
  line=$(grep '^test result:' "$log" || true)
  printf '%-10s %-16s %s\n' "$lane" "$suite" "${line:-ended early with code $code, see $log}"
  passed=$((passed + $(sed -n 's/.* \([0-9]*\) passed.*/\1/p' <<<"${line:- 0 passed}")))
  if [ "$code" != 0 ]; then failed=$((failed + 1)); fi
done
reports=$(find "$place/reports" -name 'report.*' -size +0 | wc -l)
printf '%s: %d tests passed, %d suites failed, %d processes with reports\n' \
  "$lane" "$passed" "$failed" "$reports"
if [ "$failed" != 0 ] || [ "$reports" != 0 ]; then exit 1; fi
