#!/usr/bin/env bash
# Compares quality at equal bytes with llama.cpp, on one trained model: see bench_quant.py.
#
#   scripts/bench-quant.sh LLAMA_BIN_DIR HF_MODEL CALIBRATION_TEXT WORK_DIR KIND=TEXT...
#
# Needs python3 with numpy, safetensors and gguf. Environment: GEMMA (the binary), ARGS (more
# arguments: --ablate, --tokens N).
set -euo pipefail
[ $# -ge 5 ] || { sed -n '2,6p' "$0"; exit 2; }
llama=$1 model=$2 calibration=$3 work=$4
shift 4
texts=()
for text in "$@"; do texts+=(--text "$text"); done
# shellcheck disable=SC2086
exec python3 "$(dirname "$0")/bench_quant.py" --gemma "${GEMMA:-target/release/gemma}" --llama "$llama" --model "$model" \
  --calibration "$calibration" --work "$work" "${texts[@]}" ${ARGS:-}
