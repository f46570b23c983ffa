#!/usr/bin/env bash
# Compares the CPU executor with llama.cpp on one machine, in turn. Both run random weights in the
# shape of Gemma 3 1B at about equal bytes, or one GGUF file. Prints medians over ROUNDS rounds, and
# their ratios: decode and prefill (tokens/s), and the time to verify M rows in one pass.
#
#   scripts/bench/cpu.sh LLAMA_DIR
#
# LLAMA_DIR contains llama-bench, verify-bench and make_gguf.py, or the Python package xllamacpp
# (pip install --target LLAMA_DIR xllamacpp). The package is llama.cpp for AVX2, does not time
# passes of M rows, and needs FILE.
#
# Environment: ROUNDS (5), THREADS (2), SHAPE (1b), MIX (llama-quantize's mix of types, like Q4_K_M,
# of a file that both run), FILE (a GGUF file that both run), GEMMA (target/release/gemma),
# GEMMA_ISA (the instruction set of gemma's kernels).
set -euo pipefail
llama=$(cd "${1:?usage: scripts/bench/cpu.sh LLAMA_DIR}" && pwd)
cd "$(dirname "$0")/../.."
rounds=${ROUNDS:-5} threads=${THREADS:-2} shape=${SHAPE:-1b}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

[ -n "${GEMMA:-}" ] || cargo build --release -q
gemma=${GEMMA:-$PWD/target/release/gemma}
mix=${MIX:-} file=${FILE:-}
model=${file:-$llama/bench-$shape${mix:+-$mix}.gguf}
types=(--type Q4_0 --embd Q8_0)
ours=(--synthetic "$shape" --format-weights i4-g32 --format-embedding i8-g32)
[ -z "$mix" ] || types=(--mix "$mix")
[ -z "$mix$file" ] || ours=(--model "$model" --device cpu)
[ -f "$model" ] || python3 "$llama/make_gguf.py" --preset "$shape" "${types[@]}" "$model" >/dev/null
export LD_LIBRARY_PATH=$llama:$llama/fallback${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

for i in $(seq "$rounds"); do
  echo "round $i of $rounds" >&2
  "$gemma" bench "${ours[@]}" --only prefill,decode,verify,kernels --pp 512 --tg 64 \
    --rows 1,2,4,8,16 --repetitions 3 -t "$threads" --json -q >"$work/ours-$i.json" 2>/dev/null
  if [ -d "$llama/xllamacpp" ]; then
    PYTHONPATH=$llama python3 scripts/bench/llama_wheel.py "$model" "$threads" 512 64 3 >"$work/decode-$i.json" 2>/dev/null
    : >"$work/verify-$i.txt"
    continue
  fi
  "$llama/llama-bench" -m "$model" -dev none -t "$threads" -p 512 -n 64 -r 3 -o json >"$work/decode-$i.json" 2>/dev/null
  "$llama/verify-bench" "$model" -d 0 -n 1,2,4,8,16 -r 5 -ngl 0 -t "$threads" >"$work/verify-$i.txt" 2>/dev/null
done

python3 scripts/bench/cpu_table.py "$work" "$rounds" "$model"
