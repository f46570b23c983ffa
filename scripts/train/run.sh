#!/bin/sh
# The whole training, from packed rows to exported models: run.sh DATA RUN TOKENIZER
# DATA: output of pack.py, and prompts.npz of prompts.py; RUN: folder for checkpoints, logs and
# the exported models (RUN/models). GPUS: how many GPUs.
# A file RUN/start.safetensors (weights that export.py wrote earlier) is what the stable stage goes on from.
# A file RUN/draft-start.safetensors is what the draft's training goes on from.
# STABLE, DECAY and DISTIL: the length of each stage, "--steps N" or "--seconds S"; OWN: how many
# seconds the target writes for the draft.
set -eu
here=$(dirname "$0") data=$1 run=$2 tok=$3 gpus=${GPUS:-1}
stable=${STABLE:---steps 5000} decay=${DECAY:---steps 1600} distil=${DISTIL:---steps 8000}
own=${OWN:-300} start= draft=
mkdir -p "$run"
[ ! -e "$run/start.safetensors" ] || start="--weights $run/start.safetensors"
[ ! -e "$run/draft-start.safetensors" ] || draft="--weights $run/draft-start.safetensors"
step() { name=$1; shift; [ -e "$run/$name.ok" ] || { "$@" && touch "$run/$name.ok"; }; }
spread() { script=$1; shift; torchrun --nproc-per-node "$gpus" "$here/$script" "$@"; }
# shellcheck disable=SC2086
{
  step stable spread train_target.py --data "$data" --out "$run" --stage stable $start $stable
  step decay spread train_target.py --data "$data" --out "$run" --stage decay $decay
  step target python3 "$here/export.py" --name demo-target --checkpoint "$run/target.pt" --tokenizer "$tok" --out "$run/models"
  step own spread own.py --prompts "$data/prompts.npz" --target "$run/target.pt" \
    --out "$run/own" --seconds "$own"
  step distil spread distil.py --data "$run/own" --out "$run" $draft $distil
  step draft python3 "$here/export.py" --name demo-draft --checkpoint "$run/draft.pt" --tokenizer "$tok" --out "$run/models"
}
