#!/usr/bin/env bash
# Measures memory and time of quantising layers of Gemma 3 27B's shape, with and without calibration,
# and projects them to 62 layers.
#
#   scripts/bench/quantize-27b.sh WORK_DIR TOKENIZER_JSON
#
# Makes up to 4.5 GB of random weights in WORK_DIR (one and two layers, and the whole table) and
# removes them at the end. The cost of the second layer is assumed for each further one. Any
# tokenizer with ids below 262208 will do; only text needs it. Environment:
#
#   TOKENS (4096)             of the built-in text
#   LINEAR (t2-row+h128)      the format, where no size is given
#   SIZE                      --target-size of the table with one layer and with two:
#                             "0.68GB 0.84GB" is their share of 10 GB for all of 27B
#   DEVICE (cpu), GEMMA (target/release/gemma), RUNS ("nearest text", or either)
#   SEARCH                    the benchmark of the search for trellis codes, which runs first:
#                             cargo bench --bench trellis --no-run names it
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,18s/^# \?//p' "$0"; exit 2; }
work=$1 tokens=${TOKENS:-4096} device=${DEVICE:-cpu} runs=${RUNS:-nearest text}
gemma=${GEMMA:-target/release/gemma}
[ -z "${SEARCH:-}" ] || "$SEARCH" -d "$device"
read -ra sizes <<<"${SIZE:-}"
[ -z "${SIZE:-}" ] || [ "${#sizes[@]}" = 2 ] || { echo "error: SIZE takes two sizes" >&2; exit 2; }
mkdir -p "$work"
trap 'rm -rf "$work"/src-* "$work"/dst-*' EXIT

# Measures peak memory in kB, processor seconds, which other work on the machine does not change,
# and elapsed seconds.
measure() { # label, layers, arguments
  local label=$1-$2 src=$work/src-$2
  shift 2
  python3 - "$work/$label.used" "$gemma" quantize "$src" "$work/dst-$label" -q "$@" <<'PY'
import resource, subprocess, sys, time
start = time.monotonic()
code = subprocess.run(sys.argv[2:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as out:
    print(used.ru_maxrss, used.ru_utime + used.ru_stime, time.monotonic() - start, file=out)
sys.exit(code)
PY
  # The same on every device and machine.
  cat "$work/dst-$label"/*.safetensors | sha256sum | cut -c1-16 >"$work/$label.digest"
  rm -rf "$work/dst-$label"
}
for layers in 1 2; do
  src=$work/src-$layers
  [ -d "$src" ] || python3 "$(dirname "$0")/shape_27b.py" "$src" "$layers"
  cp "$2" "$src/tokenizer.json"
  what=(--linear "${LINEAR:-t2-row+h128}" --embedding i8-row+h128)
  [ -z "${SIZE:-}" ] || what=(--target-size "${sizes[layers - 1]}")
  for run in $runs; do
    how=(-d "$device")
    [ "$run" = nearest ] || how+=(--calibrate builtin --calibrate-tokens "$tokens")
    measure "$run" "$layers" "${what[@]}" "${how[@]}"
  done
  rm -r "$src"
done

python3 - "$work" "${what[*]:0:2}" "$tokens" "$device" "$runs" <<'PY'
import sys
work, what, tokens, device, runs = sys.argv[1:]
def used(name):
    memory, busy, clock = map(float, open(f"{work}/{name}.used").read().split())
    return memory / 1e6, busy / 60, clock / 60
print(f"`{what}`, 2 layers of 27B's shape and the table, -d {device}\n")
# Matrices of a layer: 32 heads and twice 16 of 128 columns, and the three of 21504.
weights = 5376 * (2 * 4096 + 2 * 2048 + 3 * 21504)
print("| | peak memory GB | core minutes a layer | minutes a layer | million weights a second |"
      " 62 layers: core hours | hours | sha256 |")
print("|---|---:|---:|---:|---:|---:|---:|---|")
for label in runs.split():
    name = "without text" if label == "nearest" else f"with {tokens} tokens"
    one, (memory, *two) = used(f"{label}-1")[1:], used(f"{label}-2")
    layer, layer_clock = (max(0.0, b - a) for a, b in zip(one, two))
    hours = [(b + 60 * each) / 60 for b, each in zip(two, (layer, layer_clock))]
    speed = weights / 1e6 / (60 * layer_clock) if layer_clock else 0
    digest = open(f"{work}/{label}-2.digest").read().strip()
    print(f"| {name} | {memory:.2f} | {layer:.2f} | {layer_clock:.2f} | {speed:.2f} |"
          f" {hours[0]:.1f} | {hours[1]:.2f} | {digest} |")
PY
