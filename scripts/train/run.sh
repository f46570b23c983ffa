#!/bin/sh
# The whole training, from packed rows to exported models: run.sh DATA RUN TOKENIZER
# DATA: output of pack.py; RUN: folder for checkpoints, logs and the exported models (RUN/models). GPUS: how many GPUs.
# A file RUN/start.safetensors (weights that export.py wrote earlier) is what the stable stage goes on from.
# STABLE, DECAY, DISTIL and QUANT: the length of each stage, "--steps N" or "--seconds S" (QUANT: "--quant-steps N" or "--quant-seconds S").
set -eu
here=$(dirname "$0") data=$1 run=$2 tok=$3 gpus=${GPUS:-1}
stable=${STABLE:---steps 5000} decay=${DECAY:---steps 1600} distil=${DISTIL:---steps 1600} quant=${QUANT:---quant-steps 900}
prompts=${PROMPTS:-32768} new=${NEW:-256} own=${OWN:-60} start=
mkdir -p "$run"
[ ! -e "$run/start.safetensors" ] || start="--weights $run/start.safetensors"
step() { name=$1; shift; [ -e "$run/$name.ok" ] || { "$@" && touch "$run/$name.ok"; }; }
spread() { script=$1; shift; torchrun --nproc-per-node "$gpus" "$here/$script" "$@"; }
# shellcheck disable=SC2086
{
  step stable spread train_target.py --data "$data" --out "$run" --stage stable $start $stable
  step decay spread train_target.py --data "$data" --out "$run" --stage decay $decay
  step target python3 "$here/export.py" --name demo-target --checkpoint "$run/target.pt" --tokenizer "$tok" --out "$run/models"
  step own spread own.py --data "$data" --tokenizer "$tok" --target "$run/target.pt" --out "$data" --prompts "$prompts" --new "$new" --seconds "$own"
  step distil spread distil.py --data "$data" --out "$run" --target "$run/target.pt" $distil $quant
  step draft python3 "$here/export.py" --name demo-draft --checkpoint "$run/draft.pt" --tokenizer "$tok" --out "$run/models"
}
