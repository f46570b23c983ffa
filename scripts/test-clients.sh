#!/usr/bin/env bash
# Real clients of `gemma serve`, from their registries: openai, anthropic, litellm, langchain-openai
# and llm of Python, async-openai of Rust (client-rust), against the bundled model.
#
#   scripts/test-clients.sh [GEMMA]      GEMMA is the binary, target/release/gemma by default
#
#   CLIENTS=DIR      a virtual environment of Python with the packages. Without it one is made, which
#                    needs the network; a package that cannot be had is skipped, and said so.
set -euo pipefail
gemma=$(realpath "${1:-target/release/gemma}")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
# shellcheck source=scripts/server.sh
. scripts/server.sh
trap 'stop_server; rm -rf "$work"' EXIT

if [ -z "${CLIENTS:-}" ]; then
  CLIENTS=$work/venv
  python3 -m venv "$CLIENTS"
  for package in openai anthropic litellm langchain-openai llm; do
    "$CLIENTS/bin/pip" install -q "$package" >"$work/pip" 2>&1 ||
      printf 'test-clients: %s cannot be installed: %s\n' "$package" "$(tail -n 1 "$work/pip")" >&2
  done
fi
HOME=$work start_server --alias demo
HOME=$work "$CLIENTS/bin/python" scripts/test_clients.py "http://$address" "$gemma"

if target=$PWD/target/client-rust && CARGO_TARGET_DIR=$target \
  cargo build -q --manifest-path scripts/client-rust/Cargo.toml 2>"$work/cargo"; then
  expected=$(HOME=$work "$gemma" generate -q --temp 0 -n 20 \
    'What is the capital of France?' </dev/null)
  "$target/debug/client-rust" "http://$address" "$expected"
  echo "async-openai: as expected"
else
  echo "SKIPPED async-openai: it cannot be built: $(tail -n 1 "$work/cargo")"
fi
