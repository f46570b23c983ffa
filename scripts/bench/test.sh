#!/usr/bin/env bash
# Runs the scripts that measure a GPU on the CPU with small sizes. Checks their output, and their
# behaviour after a failure.
#
#   scripts/bench/test.sh [GEMMA]      GEMMA is the binary, target/release/gemma by default
#
# Needs python3, and numpy for the stand-in.
set -euo pipefail
gemma=$(realpath "${1:-target/release/gemma}")
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONDONTWRITEBYTECODE=1

fail() {
  printf 'bench/test: %s\n' "$*" >&2
  head -c 4000 "$work/out" "$work/err" >&2
  exit 1
}
# Runs a command that has to end with an exit code.
ends() { # code, command...
  local code=$1 status=0
  shift
  "$@" >"$work/out" 2>"$work/err" || status=$?
  [ "$status" = "$code" ] || fail "exit code $status, not $code: $*"
}
has() { # file, extended regular expression
  grep -qE -- "$2" "$work/$1" || fail "standard $1 lacks: $2"
}

export GEMMA=$gemma SHAPE=270m DEVICE=cpu PROMPT=8 DEPTH=8 TOKENS=2 REPETITIONS=1 ROWS=1,8,16
export KERNEL_ROWS=1,8
# One of three recipes does not exist. The others are measured, and the table comes last.
WORK=$work/gpu RECIPES="int4 nonsense t2-row+h128" ends 1 scripts/bench/gpu.sh
has err '^nonsense: exit code 3: error: '
has out '^nonsense: exit code 3'
has out '^\| int4 .*\) \| +[0-9.]+ \| +[0-9.]+ \| +[0-9]+ \|$'
tail -n 1 "$work/out" | grep -q '^| t2-row+h128 ' || fail "the table is not the last thing"
[ "$(ls "$work/gpu")" = "failed.txt
kernels.md
ours-int4.json
ours-nonsense.json.log
ours-t2-row+h128.json" ] || fail "kept: $(ls "$work/gpu")"
# Four figures of every kernel for each recipe and size of pass; the same from one file.
row='^\| gate_up +\|( +[0-9.]+ \|){7} [a-z0-9 ]+ \|$'
profiled=$(grep -cE "$row" "$work/gpu/kernels.md") || true
[ "$profiled" = 4 ] || fail "$profiled profiles of gate_up: $(cat "$work/gpu/kernels.md")"
ends 0 python3 scripts/bench/kernels.py "$work/gpu/ours-int4.json" --rows 8 --peak 100
has out '^- The peak of int8 is 100 Top/s, as given'
has out '^`int4`, .* pass of 8 rows:$'
# Without time nothing is measured, and the script says so.
WORK=$work/gpu LIMIT=0 RECIPES="int4" ends 1 scripts/bench/gpu.sh
has err '^int4: no time was left$'
has err '^error: nothing was measured'

# llama.cpp's output gives the ratios.
mkdir "$work/llama" "$work/compared"
cat >"$work/llama/make_gguf.py" <<'PY'
import sys
open(sys.argv[-1], "w").write("model")
PY
cat >"$work/llama/llama-bench" <<'SH'
#!/bin/sh
echo '[{"n_prompt": 8, "avg_ts": 100.0, "model_size": 235000000},'
echo '{"n_prompt": 0, "avg_ts": 10.0, "model_size": 235000000}]'
SH
cat >"$work/llama/verify-bench" <<'SH'
#!/bin/sh
echo '|  depth |    n |  min ms |  med ms |'
echo '|--------|------|---------|---------|'
echo '|      8 |    1 |    1.00 |    2.00 |'
echo '|      8 |    8 |    1.00 |    5.00 |'
SH
chmod +x "$work"/llama/*-bench
WORK=$work/compared RECIPES=int4 ends 0 scripts/bench/gpu.sh "$work/llama"
has out '^\| llama.cpp \| 0.235 \| +10.0 \| .* +2.0 \| +5.0 \| +- \| 2.50 \| +- \| +100 \|$'
has out '^\| int4 .*\| +[0-9.]+ \([0-9.]+\) \|$'

if ! python3 -c 'import numpy' 2>/dev/null; then
  echo "not tried: numpy is not installed, which the stand-in is made with" >&2
  exit 0
fi

# Weights are read as the program reads them, except for rounding to bf16.
for model in demo-target demo-draft; do
  ends 0 "$gemma" quantize "draft/$model" "$work/$model" --allow-requantize -q \
    --linear bf16 --embedding bf16
  ends 0 python3 - "draft/$model" "$work/$model" <<'PY'
import sys

sys.path.insert(0, "scripts/bench/standin")
import numpy as np
from artifact import weights

ours, theirs = (weights(folder)[1] for folder in sys.argv[1:])
assert ours.keys() == theirs.keys()
for name, x in ours.items():
    assert x.shape == theirs[name].shape, name
    assert np.all(np.abs(x - theirs[name]) <= np.abs(x) / 256 + 1e-6), name
PY
done

# In a larger shape a model gives the same text.
ends 0 python3 scripts/bench/standin/make.py "$work/own.gguf" --shape own
ends 0 python3 scripts/bench/standin/make.py "$work/test.gguf" --shape test
head -c 2000 docs/GLOSSARY.md >"$work/text"
ends 0 "$gemma" eval "$work/text" -m "$work/test.gguf" --reference "$work/own.gguf" -d cpu -c 256 \
  -q --json
python3 - "$work/out" <<'PY' || fail "the large shape says something else"
import json
import sys

report = json.load(open(sys.argv[1]))
sys.exit(not 0 <= report["kld"]["mean"] < 0.01)
PY
ends 1 python3 scripts/bench/standin/make.py "$work/x.gguf" --model draft/gemma3-draft/medium
has err '^help: name the tokenizer.json of a Gemma 3 with --tokenizer$'

# Both ways to generate, and the table comes last. A missing program is named.
mkdir "$work/standin"
mv "$work/test.gguf" "$work/standin/demo-target-test.gguf"
ends 1 python3 scripts/bench/standin.py --gemma "$gemma" --device cpu --shape test --count 2 \
  --tokens 12 --repetitions 1 --work "$work/standin" --llama "$work/llama"
has err '^error: .*/llama-speculative-simple cannot be run: '
row='^\| gemma, temperature 0 \|( +[0-9.]+ \|){4}$'
tail -n 1 "$work/out" | grep -qE "$row" || fail "the table is not the last thing"
echo "the scripts that measure a GPU: as documented, on the processor"
