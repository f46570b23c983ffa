#!/bin/sh
# The whole training on one GPU, from packed rows to evaluation: run.sh DATA RUN TOKENIZER
# DATA: output of pack.py; RUN: folder for checkpoints, logs and the exported models (RUN/models).
set -eu
here=$(dirname "$0") data=$1 run=$2 tok=$3
stable=${STABLE:-4620} decay=${DECAY:-1520} distil=${DISTIL:-1600} quant=${QUANT:-900} prompts=${PROMPTS:-16384} new=${NEW:-320}
mkdir -p "$run"
step() { name=$1; shift; [ -e "$run/$name.ok" ] || { python3 "$here/$@" && touch "$run/$name.ok"; }; }
step stable train_target.py --data "$data" --out "$run" --stage stable --steps "$stable"
step decay train_target.py --data "$data" --out "$run" --stage decay --steps "$decay"
step target export.py --name demo-target --checkpoint "$run/target.pt" --tokenizer "$tok" --out "$run/models" --verify
step own own.py --data "$data" --tokenizer "$tok" --target "$run/target.pt" --out "$data" --prompts "$prompts" --new "$new"
step distil distil.py --data "$data" --out "$run" --target "$run/target.pt" --steps "$distil" --quant-steps "$quant"
step draft export.py --name demo-draft --checkpoint "$run/draft.pt" --tokenizer "$tok" --out "$run/models" --verify
step evaluate evaluate.py --data "$data" --models "$run/models" --questions "$here/questions.txt" --out "$run"
