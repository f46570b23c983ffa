#!/usr/bin/env bash
# Builds and tests gemma for other systems, on Debian 12: scripts/cross.sh arm64|windows|macos [STEP]
#
# STEP is one of setup, check, build and test; without one, all of these that the system has. Two
# more are about the program that is packaged, which lacks what only tests need: `release` builds it
# and prints its path, `smoke` also does with it what users do first.
#
#   arm64    Linux on ARM64; tests run under qemu
#   windows  Windows on x86-64; tests run under wine
#   macos    macOS on ARM64; only checked by the compiler
#
# setup installs a cross compiler, a C library and an emulator from Debian (root), and unpacks the
# rustc-web of Debian's security archive, which has a standard library for ARM64 and the source of
# those for Windows and macOS, to target/cross, or to the folder that CROSS_DIR names. Nothing else
# of the system changes.
set -euo pipefail
cd "$(dirname "$0")/.."

system=${1:?usage: scripts/cross.sh arm64|windows|macos [setup|check|build|test|release]}
place=${CROSS_DIR:-$PWD/target/cross}

case $system in
  arm64) target=aarch64-unknown-linux-gnu packages=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static) ;;
  windows) target=x86_64-pc-windows-gnu packages=(gcc-mingw-w64-x86-64-win32 wine64 curl procps) ;;
  macos) target=aarch64-apple-darwin packages=() ;;
  *) echo "scripts/cross.sh: there is no system '$system'" >&2 && exit 1 ;;
esac

# What the library of LLVM that rustc is linked with needs.
packages+=(libedit2 libxml2 libz3-4)

setup() {
  local missing=() package
  for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  if [ "${#missing[@]}" -gt 0 ]; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
  fi
  if [ -e "$place/ready" ]; then return; fi
  # An apt of its own knows ARM64, so the system's need not. An interrupted set-up begins anew.
  rm -rf "$place"/{apt,debs,web,arm,src}
  mkdir -p "$place"/{apt/lists/partial,apt/cache/archives/partial,debs,web,arm,src}
  cat >"$place/apt/apt.conf" <<CONF
APT::Architecture "amd64";
APT::Architectures { "amd64"; "arm64"; };
Dir::State::Lists "$place/apt/lists";
Dir::Cache "$place/apt/cache";
CONF
  (
    export APT_CONFIG=$place/apt/apt.conf
    apt-get update -qq
    cd "$place/debs"
    std=$(apt-cache depends libstd-rust-web-dev | sed -n 's/.*Depends: \(libstd-rust-web-[0-9.]*\)$/\1/p')
    llvm=$(apt-cache depends "$std" | sed -n 's/.*Depends: \(libllvm[0-9]*\)$/\1/p')
    apt-get download -qq rustc-web libstd-rust-web-dev:amd64 "$std:amd64" "$llvm:amd64" \
      libstd-rust-web-dev:arm64 rust-web-src
  )
  for package in "$place"/debs/*_amd64.deb; do dpkg-deb -x "$package" "$place/web"; done
  dpkg-deb -x "$place"/debs/libstd-rust-web-dev_*_arm64.deb "$place/arm"
  dpkg-deb -x "$place"/debs/rust-web-src_*_all.deb "$place/src"
  local libraries=$place/web/usr/lib/rustlib
  cp -al "$place/arm/usr/lib/rustlib/aarch64-unknown-linux-gnu" "$libraries/"
  mkdir -p "$libraries/src"
  ln -sfn "$(echo "$place"/src/usr/src/rustc-*)" "$libraries/src/rust"
  for package in rustc rustdoc; do
    printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s\nexec %s "$@"\n' \
      "$place/web/usr/lib/x86_64-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" \
      "$place/web/usr/bin/$package" >"$place/$package"
    chmod +x "$place/$package"
  done
  rm -rf "$place/debs" "$place/arm" "$place/apt"
  "$place/rustc" --version
  touch "$place/ready"
}

export RUSTC=$place/rustc RUSTDOC=$place/rustdoc CARGO_TARGET_DIR=$place/target-$system
export CARGO_PROFILE_RELEASE_DEBUG=0
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc
std=()
if [ "$system" != arm64 ]; then
  # Cargo builds the standard library only for those who say that they know what they do.
  export RUSTC_BOOTSTRAP=1
  std=(-Z "build-std=std,panic_unwind,test")
fi
# The C code of `ring` is not compiled for macOS: a check links nothing.
export CC_aarch64_apple_darwin=true AR_aarch64_apple_darwin=true
built=$CARGO_TARGET_DIR/$target/release suffix=
if [ "$system" = windows ]; then suffix=.exe; fi

# Builds the program and the binaries of tests, each once.
build() {
  local suites=(--test text)
  if [ "$system" = windows ]; then
    suites+=(--lib --test model --test gguf --test plan)
    # build.rs links the program so. Unit tests of the other crates are linked by no script.
    suites+=(--config "target.$target.rustflags = ['-Clink-arg=-Wl,--wrap=fmaf']")
  fi
  cargo test --release --locked --no-run "${std[@]}" --target "$target" "${suites[@]}" 2>&1 |
    tee "$place/build-$system.log"
  rm -rf "$place/tests-$system"
  mkdir "$place/tests-$system"
  # The last lines name the binaries: Executable tests/text/main.rs (.../deps/text-...)
  sed -n 's/^ *Executable .*(\(.*\))$/\1/p' "$place/build-$system.log" | while read -r binary; do
    name=$(basename "$binary")
    name=${name%-*}${name#"${name%.exe}"}
    # The tests of the library have the name of the program, which other tests look for beside them.
    cp "$binary" "$place/tests-$system/${name/#gemma/lib}"
  done
  cp "$built/gemma$suffix" "$place/tests-$system/"
  if [ "$system" = windows ]; then
    make_random_numbers "$built"
    make_random_numbers "$place/tests-$system"
  fi
}

# Builds the program that is packaged, which is then the one that is run.
program() {
  # Paths of this machine stay out of the program, as in release.sh. The last prefix counts most.
  local flags= from
  for from in "$PWD=/gemma" "${CARGO_HOME:-$HOME/.cargo}=/cargo" "$place=/cross"; do
    flags+=${flags:+$'\x1f'}--remap-path-prefix=$from
  done
  export CARGO_ENCODED_RUSTFLAGS=$flags CARGO_PROFILE_RELEASE_STRIP=symbols
  # Other flags build all again, so tests and packages do not share a folder.
  export CARGO_TARGET_DIR=$place/release-$system
  built=$CARGO_TARGET_DIR/$target/release
  cargo build -q --release --locked "${std[@]/,test/}" --target "$target" --bin gemma >&2
}

# Wine 8 lacks the library that the standard library takes random numbers from. Windows has it.
make_random_numbers() { # DIRECTORY
  cat >"$place/random.c" <<'C'
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T n) {
    for (; n; ) {
        ULONG part = n > 1u << 30 ? 1u << 30 : (ULONG)n;
        if (!SystemFunction036(bytes, part)) return FALSE;
        bytes += part, n -= part;
    }
    return TRUE;
}
C
  x86_64-w64-mingw32-gcc -O2 -shared -o "$1/bcryptprimitives.dll" "$place/random.c" -ladvapi32
}

run() { # PROGRAM ARGUMENT...
  case $system in
    arm64)
      # Tests start the program by it too.
      export TEST_EMULATOR="qemu-aarch64-static -L /usr/aarch64-linux-gnu -cpu ${cpu:-max}"
      $TEST_EMULATOR "$@"
      ;;
    windows) wine wine64 "$@" ;;
  esac
}

wine() { # COMMAND ARGUMENT...
  HOME=$place/home WINEPREFIX=$place/wine WINEDEBUG=-all "/usr/lib/wine/$1" "${@:2}"
}

# Makes wine's files, and starts a server that serves all programs of this script. By default the
# first program makes the files while it runs, and the server ends and starts between programs.
start_wine() {
  wine wine64 wineboot --init
  wine wineserver64 -w
  wine wineserver64 -p
  trap 'wine wineserver64 -k || true' EXIT
}

# Runs a test binary with filters, and prints its last line.
tests() { # NAME FILTER...
  local log=$place/tests-$system.log binary=$place/tests-$system/$1$suffix code=0
  shift
  run "$binary" "$@" >"$log" 2>&1 || code=$?
  printf '%s %s%s: %s\n' "$system" "${cpu:+$cpu }" "$(basename "$binary")${*:+ $*}" \
    "$(grep '^test result:' "$log" || echo "ended with code $code")"
  if [ "$code" != 0 ]; then
    tail -40 "$log" >&2
    exit 1
  fi
}

# The texts of the program itself are those of the build for this machine, where there is one.
compare() {
  local native=target/release/gemma seed temperature
  if [ ! -x "$native" ]; then
    echo "$system: not compared with $native, which is not built"
    return
  fi
  for temperature in 0 1; do
    for seed in 1 2 3; do
      local ask=(generate --temp "$temperature" --seed "$seed" -n 24 "Tell me about the sea")
      "$native" "${ask[@]}" </dev/null >"$place/native" 2>/dev/null
      run "$built/gemma$suffix" "${ask[@]}" </dev/null >"$place/foreign" 2>/dev/null
      cmp "$place/native" "$place/foreign"
    done
  done
  echo "$system: the demo's texts at temperature 0 and 1, three seeds each, are equal"
}

# Requires that the kernels compute what the reference kernels compute, and else prints all checks.
doctor() {
  local log=$place/doctor-$system code=0
  run "$built/gemma$suffix" doctor >"$log" || code=$?
  grep -E '^[A-Z]+ +processor' "$log" || true
  if [ "$code" != 0 ] || ! grep -E '^PASS +kernels, cpu' "$log"; then
    cat "$log" >&2
    echo "$system: gemma doctor ended with code $code" >&2
    exit 1
  fi
}

smoke_arm64() {
  doctor
  compare
}

test_arm64() {
  run "$built/gemma" --version
  # Their dispatch paths are i8mm, dotprod and plain Rust.
  for cpu in ${CROSS_CPUS:-max neoverse-n1 cortex-a72}; do
    smoke_arm64
    tests text systems:: linear:: row_exactness:: kv_q8:: drafter_invariance::
  done
  for instruction in sdot smmla; do
    count=$(aarch64-linux-gnu-objdump -d "$built/gemma" | grep -cw "$instruction")
    echo "$instruction: $count times in the program"
  done
}

# Everything once; a server with one client comes last.
smoke_windows() {
  local gemma=$built/gemma.exe there=$place/smoke
  rm -rf "$there"
  mkdir "$there"
  start_wine
  run "$gemma" --version
  doctor
  compare
  (
    cd "$there"
    echo "Who are you?" | run "$gemma" generate -q -n 20 | grep .
    printf '{"id": %d, "prompt": "Write about the sea.", "max_tokens": 8}\n' 1 2 3 >in.jsonl
    run "$gemma" generate -q --batch in.jsonl --resume out.jsonl
    cp out.jsonl whole
    head -1 whole >out.jsonl
    run "$gemma" generate -q --batch in.jsonl --resume out.jsonl
    cmp whole out.jsonl
    echo "windows: a batch was resumed"
    run "$gemma" quantize "$OLDPWD/tests/golden/text" small -q
    ls small/model.safetensors
    run "$gemma" serve --port 0 2>log &
    server=$!
    trap 'pkill -P $server' EXIT
    for _ in $(seq 60); do
      address=$(sed -n 's/.*answers at \(http[^ \r]*\).*/\1/p' log)
      if [ -n "$address" ]; then break; fi
      sleep 1
    done
    curl -sf "$address/v1/completions" -d '{"prompt": "The sea", "max_tokens": 4}' | grep -o '"text":[^}]*'
  )
}

# The tests that need no Unix.
test_windows() {
  smoke_windows
  for name in lib lib_{base,model,npu,quant,runtime,vulkan} model gguf plan text; do tests "$name"; done
}

case ${2:-all} in
  setup) setup ;;
  check)
    setup
    cargo check --release --locked "${std[@]}" --target "$target"
    ;;
  build)
    setup
    build
    ;;
  release)
    setup >&2
    program
    echo "$built/gemma$suffix"
    ;;
  smoke)
    setup
    program
    if [ "$system" = windows ]; then make_random_numbers "$built"; fi
    "smoke_$system"
    ;;
  test) "test_$system" ;;
  all)
    setup
    if [ "$system" = macos ]; then
      cargo check --release --locked "${std[@]}" --target "$target"
    else
      build
      "test_$system"
    fi
    ;;
  *) echo "scripts/cross.sh: there is no step '$2'" >&2 && exit 1 ;;
esac
