#!/usr/bin/env bash
# The Vulkan engine against llama.cpp's on one GPU, in one go: 27B's shape with random weights, 4 bits, the same depth.
#
#   scripts/bench-gpu.sh LLAMA_DIR MAKE_GGUF [DEPTH]      LLAMA_DIR holds llama-bench and verify-bench; GEMMA names our binary
#
# Builds nothing. Needs about 35 GB of disk in WORK (default: a temporary directory) and 20 GB of device memory. Theirs is
# Q4_0 + Q6_K; ours i4-g32 + i8-row (the same codes and scales, a larger table), the house's i4-row+h128, the recipe
# `seed`, a mix of as many bytes, and t3-row+h128. Then a real file: the GGUF, loaded twice.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,8p' "$0"; exit 2; }
llama=$1 make_gguf=$2 depth=${3:-512}
gemma=${GEMMA:-target/release/gemma}
work=${WORK:-$(mktemp -d)}
rows=1,2,4,8,16,32
mkdir -p "$work"

measure() { # name, weights
  "$gemma" bench --synthetic 27b "${@:2}" -d vulkan --only prefill,decode,verify,kernels \
    --depth "$depth" --tg 64 --rows "$rows" --repetitions 3 --format json -q >"$work/ours-$1.json"
}
measure i4-g32 --format-weights i4-g32
measure i4-row+h128 --format-weights i4-row+h128
measure seed --recipe seed
# The seed's bits with a scale a row.
cat >"$work/mix.toml" <<'TOML'
[formats]
"{embed_tokens,lm_head}" = "i8-row"
"layers.*.mlp.{gate,up}_proj" = "i2-row+h128"
"linears" = "i4-row+h128"
"norms" = "as-is"
TOML
measure mix --recipe "$work/mix.toml"
measure t3-row+h128 --format-weights t3-row+h128
python3 "$make_gguf" --preset 27b --type Q4_0 --embd Q6_K "$work/a.gguf" >/dev/null
"$llama/llama-bench" -m "$work/a.gguf" -ngl 99 -fa 1 -p 512 -n 64 -d "$depth" -r 3 -o json >"$work/bench.json" 2>"$work/bench.log"
"$llama/verify-bench" "$work/a.gguf" -d "$depth" -n "$rows" -r 5 -ngl 99 -fa 1 >"$work/verify.txt" 2>"$work/verify.log"

# Loading a file that the system has in memory: the second time counts.
for _ in 1 2; do
  "$gemma" bench -m "$work/a.gguf" -d vulkan --only load --format json -q >"$work/load.json"
done

python3 "$(dirname "$0")/bench_gpu_table.py" "$work"
