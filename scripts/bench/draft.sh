#!/usr/bin/env bash
# Measures the tokens per pass that each source of drafts adds, by replay of texts that no model was
# trained on.
#
#   scripts/bench/draft.sh HELDOUT_DIR WORK_DIR [PROMPTS_DIR]
#
# HELDOUT_DIR    KIND-*.txt or .txt.zst; a line <|doc|> ends a document, chats are Gemma turns
# WORK_DIR       gets the transcripts and the results; it must be outside the project
# PROMPTS_DIR    *.jsonl with "turns" and "reference"
#
# Needs cargo build --release --example replay, python3, and zstd for .zst files. Environment:
#
#   REPLAY            the program of examples/replay.rs
#   DRAFT, TOKENIZER  a draft model and the tokenizer of the texts (the bundled pair's)
#   COUNT, TOKENS     most texts of a kind, most tokens of a text
#   CONFIGS           the configurations to run
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,10p' "$0"; exit 2; }
heldout=$1 work=$2 prompts=${3:-}
replay=${REPLAY:-target/release/examples/replay} table=$(dirname "$0")/draft.py
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
  "$replay" "$work/heldout.jsonl" --count "${COUNT:-60}" --tokens "${TOKENS:-256}" \
    --draft "${DRAFT:-auto}" ${TOKENIZER:+--tokenizer "$TOKENIZER"} ${config[$name]} ${ARGS:-} >"$work/$name.json"
  echo "$name done" >&2
done
# shellcheck disable=SC2086
python3 "$table" table "$work" $order
