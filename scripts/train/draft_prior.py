"""The mixer's weights for temperature 0: the block COLD of crates/runtime/src/draft/mix/prior.rs.

  cargo run --release --example replay -- TRAIN.jsonl --tokenizer GEMMA --draft MEDIUM >REPORT.json
  draft_prior.py REPORT.json

TRAIN.jsonl is text that the drafts were trained on, GEMMA a directory with Gemma 3's
tokenizer.json, MEDIUM a directory with the files of draft/gemma3-draft/medium. The weights in the
project are of 160 texts (20,699 tokens, 40 of each kind). The block WARM was learnt at temperature
1 from answers of the medium draft to 60 prompts, with the small one as its draft."""

import json
import sys

NAMES = ["everywhere"]
NAMES += [f"match of {n}" for n in ("none", "1", "2", "3", "4-7", "8-15", "16 and more")]
NAMES += ["no model"] + [
    f"model {n}" for n in ("below .25", "below .5", "below .75", "below .92", "surer")
]
NAMES += ["no record", "last token known", "pair seen once", "2-4 times", "more often"]

with open(sys.argv[1], encoding="utf-8") as file:
    rows = json.load(file)["weights"]
print("static COLD: Weights = [")
for row, label in zip(rows, NAMES, strict=True):
    print(f"    [{', '.join(f'{w:.3f}' for w in row)}], // {label}")
print("];")
