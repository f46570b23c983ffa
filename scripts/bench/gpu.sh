#!/usr/bin/env bash
# Measures the Vulkan engine recipe by recipe, in 27B's shape with made-up weights, and llama.cpp if
# it is given.
#
#   scripts/bench/gpu.sh [LLAMA_DIR]     LLAMA_DIR holds llama-bench, verify-bench and make_gguf.py
#
# Measures prefill, decode, passes over several rows and each kernel, and prints one table last.
# Builds nothing; needs python3, 20 GB of device memory, and with llama.cpp 16 GB of disk. What
# fails or has no time left is named, the rest is measured, and the script exits 1. Environment:
#
#   RECIPES      recipes of gemma quantize, TOML files, single formats of the linear layers, or
#                `file`: llama.cpp's model as it is
#   MIX          llama-quantize's mix of types in llama.cpp's model, like Q4_K_M (Q4_0 with a Q6_K
#                table)
#   WORK         where the JSON of each is kept, and llama.cpp's model (a new directory)
#   EACH, LIMIT  most seconds of one measurement (90), and of everything (540)
#   DEPTH        tokens in the cache (512)
#   KERNEL_ROWS  rows of the passes in which kernels are timed (1,8,16,128), for kernels.py
#   REPETITIONS (3), TOKENS of the decode test (32), GEMMA (target/release/gemma)
#   SHAPE (27b), DEVICE (vulkan), ROWS (1,2,4,8,16,32), PROMPT (512), LLAMA_ARGS (-ngl 99)
set -uo pipefail
mix=${MIX:-}
here=$(cd "$(dirname "$0")" && pwd)
# The recipe int4 is the format i4-g32.
all="seed int4 9gb 10gb 12gb i4-row+h128 t2-row+h128 t3-row+h128 t4-row+h128"
recipes=${RECIPES:-$all} kernel_rows=${KERNEL_ROWS:-1,8,16,128}
llama=${1:-} gemma=${GEMMA:-$here/../../target/release/gemma} work=${WORK:-$(mktemp -d)}
each=${EACH:-90} limit=${LIMIT:-540} depth=${DEPTH:-512} rows=${ROWS:-1,2,4,8,16,32}
prompt=${PROMPT:-512} tokens=${TOKENS:-32} repetitions=${REPETITIONS:-3}
shape=${SHAPE:-27b} device=${DEVICE:-vulkan} llama_args=${LLAMA_ARGS:--ngl 99}
if [[ $llama = -* ]]; then
  sed -n '2,21s/^# \?//p' "$0"
  exit 2
fi
mkdir -p "$work" || exit 1
rm -f "$work"/ours-* "$work"/theirs-* "$work/kernels.md"
: >"$work/failed.txt"

# Runs a command within the time that is left; its output appears complete or not at all.
measure() { # name, file, command...
  local name=$1 file=$2 start=$SECONDS left=$((limit - SECONDS)) status why
  shift 2
  if [ "$left" -lt 1 ]; then
    echo "$name: no time was left" | tee -a "$work/failed.txt" >&2
    return 1
  fi
  timeout -k 5 $((left < each ? left : each)) "$@" >"$file.part" 2>"$file.log"
  status=$?
  if [ "$status" != 0 ]; then
    why=$(grep -m 1 "^error" "$file.log" || tail -n 1 "$file.log")
    case $status in 124 | 137) why="it took longer than $((SECONDS - start)) s" ;; esac
    echo "$name: exit code $status: $why" | tee -a "$work/failed.txt" >&2
    rm "$file.part"
    return 1
  fi
  mv "$file.part" "$file"
  rm "$file.log"
  echo "$name: $((SECONDS - start)) s" >&2
}

if [ -n "$llama" ]; then
  llama=$(cd "$llama" && pwd) || exit 1
  # Libraries that the system may lack are next to the programs.
  with=()
  if ldd "$llama/llama-bench" 2>/dev/null | grep -q "not found"; then
    with=(env "LD_LIBRARY_PATH=$llama/fallback")
  fi
  model=$work/llama-$shape${mix:+-$mix}.gguf types=(--type Q4_0 --embd Q6_K)
  [ -n "$mix" ] && types=(--mix "$mix")
  if [ ! -f "$model" ]; then
    measure "llama.cpp's model" "$work/theirs-made.txt" python3 "$llama/make_gguf.py" \
      --preset "$shape" "${types[@]}" "$model.part" && mv "$model.part" "$model"
  fi
  if [ -f "$model" ]; then
    # shellcheck disable=SC2086
    measure llama-bench "$work/theirs-speed.json" "${with[@]}" "$llama/llama-bench" -m "$model" \
      -p "$prompt" -n "$tokens" -d "$depth" -r "$repetitions" -fa 1 $llama_args -o json
    # shellcheck disable=SC2086
    measure verify-bench "$work/theirs-passes.txt" "${with[@]}" "$llama/verify-bench" "$model" \
      -n "$rows" -d "$depth" -r 5 -fa 1 $llama_args
  fi
fi

for recipe in $recipes; do
  case $recipe in
    file) what=(--model "${model:?RECIPES=file needs LLAMA_DIR}") ;;
    *.toml) what=(--synthetic "$shape" --recipe "$recipe") ;;
    *-*) what=(--synthetic "$shape" --format-weights "$recipe") ;;
    *) what=(--synthetic "$shape" --recipe "$recipe") ;;
  esac
  measure "$recipe" "$work/ours-$(basename "$recipe" .toml).json" \
    "$gemma" bench "${what[@]}" -d "$device" \
    --only prefill,decode,verify,kernels --pp "$prompt" --tg "$tokens" --depth "$depth" \
    --rows "$rows" --kernel-rows "$kernel_rows" --repetitions "$repetitions" --json -q
done

if compgen -G "$work/ours-*.json" >/dev/null; then
  python3 "$here/kernels.py" "$work"/ours-*.json >"$work/kernels.md"
fi
echo "kept in $work: each figure, and the profile of each kernel (kernels.md)" >&2
python3 "$here/gpu_table.py" "$work" || exit 1
[ ! -s "$work/failed.txt" ]
