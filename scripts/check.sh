#!/usr/bin/env bash
# Runs what CI checks, and stops at the first failure:
#
#   scripts/check.sh          the checks of a change
#   scripts/check.sh --all    all checks, before a release; writes target/checked
#
# Checks of one part run if that part differs from the commit in .ci/checked, for which the checks of
# all parts passed: in `--all`, or in CI while all parts differed. GEMMA_REQUIRE_GPU=1 adds the tests
# of the GPU, which run on Mesa's software driver if there is no other.
set -euo pipefail
cd "$(dirname "$0")/.."

all=
case ${1:-} in
  "") ;;
  --all) all=1 ;;
  *) echo "scripts/check.sh: there is no option '$1'" >&2 && exit 1 ;;
esac

# Debug information is not needed here.
export CARGO_PROFILE_RELEASE_DEBUG=0

step() { printf '\n== %s (after %s s)\n' "$1" "$SECONDS"; }

# Returns whether files that match one of these patterns changed since .ci/checked. Without that
# commit they count as changed.
touched() { # PATTERN...
  local checked
  checked=$(cat .ci/checked)
  if [ -n "$all" ] || ! git cat-file -e "$checked^{commit}" 2>/dev/null; then return 0; fi
  ! git diff --quiet "$checked" -- "$@"
}

step "format"
cargo fmt --check

step "build"
# The program with the feature `testing`. The program without it is only linted below, which saves
# minutes.
cargo test --release --no-run

step "README and docs"
scripts/check-readme.sh target/release/gemma

# The tests of the GPU keep one processor busy with compiling kernels, so they run beside all that
# follows. Their output comes last.
vulkan=$(mktemp)
skip=()
if ! touched shaders crates/vulkan crates/base tests/vulkan tests/common \
  ':!crates/base/src/compute/cpu' ':!crates/base/src/os' ':!crates/base/src/util'; then
  skip=(-- --skip twins:: --skip order:: --skip poison::)
  echo "NOT CHECKED: each kernel of a GPU by itself, since none of their files changed"
fi
cargo test --release --no-fail-fast --test vulkan "${skip[@]}" >"$vulkan" 2>&1 &
beside=$!
trap 'kill $beside 2>/dev/null || true; rm -f "$vulkan"' EXIT

step "tests"
suites=()
for suite in tests/*/main.rs; do
  suite=$(basename "$(dirname "$suite")")
  if [ "$suite" != vulkan ]; then suites+=(--test "$suite"); fi
done
cargo test --release --no-fail-fast --lib --bins "${suites[@]}"
cargo test --release --doc

step "models of the threads, in every order"
cargo run -q --release --manifest-path tests/loom/Cargo.toml --target-dir target/loom

step "Google's Gemma 3 270M"
GEMMA_REAL_DEVICES=${GEMMA_REAL_DEVICES:-cpu} scripts/real-gemma.sh target/real-gemma

if touched shaders crates/vulkan scripts/check/amd scripts/check/amd.sh; then
  step "kernels on AMD GPUs, as their driver compiles them"
  scripts/check/amd.sh
fi

step "one batch, cut in every way"
SPARK=$all scripts/check/scale-out.sh target/release/gemma

step "scripts that measure a GPU"
scripts/bench/test.sh target/release/gemma

step "lints"
# Among them clippy::incompatible_msrv: no function of the standard library that is newer than the
# Rust which Cargo.toml names.
cargo clippy --release -- -D warnings
cargo clippy --release --all-targets --features fuzzing -- -D warnings

step "other systems"
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  lane=check
  if touched Cargo.lock build.rs crates/base/src/os scripts/cross.sh; then lane=smoke; fi
  scripts/cross.sh macos
  scripts/cross.sh arm64 "$lane"
  scripts/cross.sh windows "$lane"
else
  echo "NOT CHECKED: scripts/cross.sh sets up compilers from Debian's packages, as root"
fi

step "libraries"
python3 scripts/crates.py check
python3 scripts/crates.py binary target/release/gemma
command -v cargo-deny >/dev/null || {
  echo "error: cargo-deny is missing: cargo install --locked cargo-deny" >&2
  exit 1
}
cargo deny check licenses bans sources
if cargo deny fetch db; then
  cargo deny check advisories
else
  echo "NOT CHECKED: advisories, because their database cannot be reached"
fi

step "tests of the GPU"
code=0
wait $beside || code=$?
cat "$vulkan"
if [ "$code" != 0 ]; then exit "$code"; fi

if [ "${GEMMA_REQUIRE_GPU:-}" = 1 ]; then
  step "Vulkan under the validation layers"
  # A complaint ends the command with a panic; the tests above ran under the layers too.
  GEMMA_VULKAN_CPU=1 GEMMA_VULKAN_VALIDATE=1 target/release/gemma generate -d vulkan --temp 0 \
    -n 40 "What is photosynthesis?" </dev/null
fi

if [ -n "$all" ]; then
  # It gives way to all else, and an input may not take long, so nothing runs beside it.
  step "fuzzing, ten seconds for each reader"
  JOBS=2 scripts/check/fuzz.sh 0.17
  git rev-parse HEAD >target/checked
  if [ -n "$(git status --porcelain)" ]; then
    rm target/checked
    echo "all checks passed, but files differ from the commit, so it is not marked as checked"
  else
    echo "all checks passed: release.sh takes this commit. Mark it: cp target/checked .ci/checked"
  fi
fi
step "done"
