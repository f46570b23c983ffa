#!/usr/bin/env bash
# Runs everything that CI checks, the cheapest first, and stops at the first failure.
set -euo pipefail
cd "$(dirname "$0")/.."

# Debug information is not needed here.
export CARGO_PROFILE_RELEASE_DEBUG=0

step() { printf '\n== %s\n' "$1"; }

step "format"
cargo fmt --check

step "build"
# The program with the feature `testing`. The program without it is only linted below, which saves
# minutes.
cargo test --release --no-run

step "README and docs"
scripts/check-readme.sh target/release/gemma

step "tests"
cargo test --release --no-fail-fast --lib --bins --tests
cargo test --release --doc

step "Google's Gemma 3 270M"
GEMMA_REAL_DEVICES=${GEMMA_REAL_DEVICES:-cpu} scripts/real-gemma.sh target/real-gemma

step "kernels on AMD GPUs, as their driver compiles them"
scripts/check-amd.sh

step "one batch, cut in every way"
scripts/test-scale-out.sh target/release/gemma

step "scripts that measure a GPU"
scripts/test-bench.sh target/release/gemma

if [ "${GEMMA_REQUIRE_GPU:-}" = 1 ]; then
  step "Vulkan under the validation layers"
  # A complaint ends the command with a panic; the tests above ran under the layers too.
  GEMMA_VULKAN_CPU=1 GEMMA_VULKAN_VALIDATE=1 target/release/gemma generate -d vulkan --temp 0 \
    -n 40 "What is photosynthesis?" </dev/null
fi

step "lints"
cargo clippy --release -- -D warnings
cargo clippy --release --all-targets -- -D warnings

step "licences and sources of the libraries"
if ! cargo deny --version >/dev/null 2>&1; then
  echo "SKIPPED: cargo-deny is not installed (cargo install --locked cargo-deny)"
elif cargo deny fetch >/dev/null 2>&1; then
  cargo deny check
else
  echo "SKIPPED: the database of advisories cannot be reached"
  cargo deny check licenses bans sources
fi
