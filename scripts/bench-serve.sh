#!/usr/bin/env bash
# What the server costs and holds: time over what the engine alone takes, throughput by clients, the
# first token beside a long prompt, what an agent's turns read again, and a soak with cancellations.
#
#   scripts/bench-serve.sh [GEMMA] [SERVE OPTIONS...]
#
# GEMMA is the binary, target/release/gemma by default; the bundled pair on the processor where no
# other model is named. Needs python3.
#
#   TOKENS=200       tokens of each answer
#   CLIENTS="1 8 32" clients at once
#   LONG=4000        words of the long prompt; the context is --ctx-size, 16,384 here
#   SOAK=1000        requests of the soak, a fifth cancelled, a tenth malformed
set -euo pipefail
gemma=$(realpath "${1:-target/release/gemma}")
shift || true
cd "$(dirname "$0")/.."
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT
export GEMMA_DRAFT_MEMORY=off
"$gemma" serve --port 0 --log off --ctx-size 16384 --parallel 32 --max-queue 1000 "$@" \
  2>"$work/said" &
server=$!
for _ in $(seq 6000); do
  grep -q 'answers at' "$work/said" && break
  kill -0 "$server" || { cat "$work/said" >&2; exit 1; }
  sleep 0.1
done
address=$(sed -n 's|.*answers at http://\([^ ]*\).*|\1|p' "$work/said")
GEMMA=$gemma SERVER=$server python3 scripts/bench_serve.py "$address" "$@"
