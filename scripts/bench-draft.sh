#!/usr/bin/env bash
# Tokens per pass that each part of the drafting stack brings, by replay of texts that no model was trained on.
#
#   scripts/bench-draft.sh HELDOUT_DIR WORK_DIR [PROMPTS_DIR]
#
# HELDOUT_DIR holds KIND-*.txt or .txt.zst, documents ended by a line <|doc|>, chats as Gemma turns; PROMPTS_DIR *.jsonl with "turns"
# and "reference". WORK_DIR, outside the project, gets the transcripts and the results. GEMMA names the binary, DRAFT and TOKENIZER
# a draft model and the tokenizer to read the texts with (the bundled pair's otherwise), COUNT and TOKENS bound the texts of a kind
# and the tokens of each, CONFIGS picks configurations. Needs python3, and zstd for .zst files.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,10p' "$0"; exit 2; }
heldout=$1 work=$2 prompts=${3:-}
gemma=${GEMMA:-target/release/gemma} table=$(dirname "$0")/bench_draft.py
mkdir -p "$work"
python3 "$table" convert "$heldout" "$work/heldout.jsonl" ${prompts:+--prompts "$prompts"}

declare -A config=(
  [full]=""
  [lookup]="--sources context"
  [table]="--sources table"
  [ngram]="--sources context,table"
  [model]="--sources model"
  [no-table]="--sources context,model"
  [no-context]="--sources table,model"
  [fixed]="--mixing fixed"
  [taught]="--mixing taught"
  [chain]="--draft-tree chain --draft-tokens 15"
  [chain-8]="--draft-tree chain --draft-tokens 8"
  [tree-7]="--draft-tree 7"
  [tree-31]="--draft-tree 31"
)
order=${CONFIGS:-full lookup table ngram model no-table no-context fixed taught chain chain-8 tree-7 tree-31}
for name in $order; do
  # shellcheck disable=SC2086
  "$gemma" bench -q --replay "$work/heldout.jsonl" --json --replay-count "${COUNT:-60}" --replay-tokens "${TOKENS:-256}" \
    --draft "${DRAFT:-auto}" ${TOKENIZER:+--tokenizer "$TOKENIZER"} ${config[$name]} ${ARGS:-} >"$work/$name.json"
  echo "$name done" >&2
done
# shellcheck disable=SC2086
python3 "$table" table "$work" $order
