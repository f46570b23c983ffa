#!/usr/bin/env bash
# Memory and time of quantising layers of Gemma 3 27B's shape, without text and with it, and what 62 of them would take.
#
#   scripts/bench-quantize-27b.sh WORK_DIR TOKENIZER_JSON
#
# Makes 4.5 GB of random weights in WORK_DIR (two layers and the whole table) and removes them at the end. The tokenizer may be any
# whose ids stay below 262208; text alone needs it. TOKENS (4096) of the built-in text; LINEAR (t2-row+h128).
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,7p' "$0"; exit 2; }
work=$1 tokens=${TOKENS:-4096} linear=${LINEAR:-t2-row+h128}
gemma=${GEMMA:-target/release/gemma}
mkdir -p "$work"
trap 'rm -rf "$work/src" "$work"/dst-*' EXIT
[ -d "$work/src" ] || python3 "$(dirname "$0")/make_27b_shape.py" "$work/src" 2
cp "$2" "$work/src/tokenizer.json"

# The table alone first: what it takes is taken off the rest.
measure() { # label, arguments
  local label=$1
  shift
  # Peak memory and the processor's time, which other work on the machine does not change.
  /usr/bin/time -f '%M %U %S' -o "$work/$label.used" "$gemma" quantize "$work/src" "$work/dst-$label" --embedding i8-row -q "$@"
  rm -rf "$work/dst-$label"
}
measure table --linear i8-row
measure nearest --linear "$linear"
measure text --linear "$linear" --calibrate builtin --calibrate-tokens "$tokens"

python3 - "$work" "$linear" "$tokens" <<'PY'
import sys
work, linear, tokens = sys.argv[1:]
def used(name):
    memory, user, system = map(float, open(f"{work}/{name}.used").read().split()[-3:])
    return memory / 1e6, (user + system) / 60
base = used("table")[1]
print(f"| {linear}, 2 layers of 27B's shape and the table | peak memory GB | core minutes | core minutes a layer | projected for 62 layers, core hours |")
print("|---|---:|---:|---:|---:|")
for label, name in (("nearest", "without text"), ("text", f"with {tokens} tokens")):
    memory, minutes = used(label)
    layer = max(0.0, minutes - base) / 2
    print(f"| {name} | {memory:.2f} | {minutes:.1f} | {layer:.2f} | {(layer * 62 + base) / 60:.1f} |")
PY
