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
server=
trap '[ -z "$server" ] || { kill "$server"; wait "$server" || true; }; rm -rf "$work"' EXIT

if [ -z "${CLIENTS:-}" ]; then
  CLIENTS=$work/venv
  python3 -m venv "$CLIENTS"
  for package in openai anthropic litellm langchain-openai llm; do
    "$CLIENTS/bin/pip" install -q "$package" >"$work/pip" 2>&1 ||
      printf 'test-clients: %s cannot be installed: %s\n' "$package" "$(tail -n 1 "$work/pip")" >&2
  done
fi
HOME=$work GEMMA_DRAFT_MEMORY=off "$gemma" serve --port 0 --alias demo 2>"$work/said" &
server=$!
for _ in $(seq 600); do
  grep -q 'answers at' "$work/said" && break
  kill -0 "$server" || { cat "$work/said" >&2; exit 1; }
  sleep 0.1
done
address=$(sed -n 's|.*answers at \(http://[^ ]*\).*|\1|p' "$work/said")
HOME=$work "$CLIENTS/bin/python" scripts/test_clients.py "$address" "$gemma"

if target=$PWD/target/client-rust && CARGO_TARGET_DIR=$target \
  cargo build -q --locked --manifest-path scripts/client-rust/Cargo.toml 2>"$work/cargo"; then
  expected=$(HOME=$work "$gemma" generate -q --temp 0 -n 20 --draft-memory off \
    'What is the capital of France?' </dev/null)
  "$target/debug/client-rust" "$address" "$expected"
  echo "async-openai: as expected"
else
  echo "SKIPPED async-openai: it cannot be built: $(tail -n 1 "$work/cargo")"
fi
