"""Held-out figures of a quantised draft as the program itself computes it: `gemma eval` on rows of
the draft's vocabulary.

    python draft_engine_eval.py --gemma target/release/gemma --model DIR --data DATA --tokenizer
    tokenizer.json [--tokens 200000]

Each document begins from an empty cache; one longer than 1,024 rows is cut. All tokens of the text
count; those outside the vocabulary are never guessed."""
import argparse
import glob
import json
import os
import subprocess
import tempfile

import numpy as np

from draft_tokens import ANSWER
from draft_vocab import Vocabulary, pieces_of

KINDS = {"code": ("code",), "docs": ("docs",), "prose": ("prose",), "instruct": ("chat", "derived")}
WINDOW = 1024


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gemma", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--tokens", type=int, default=200_000, help="of each kind, at most")
    a = ap.parse_args()
    vocabulary = Vocabulary(os.path.join(a.model, "draft_vocabulary.json"), pieces_of(a.tokenizer))
    for kind, streams in KINDS.items():
        paths = sorted(
            p for s in streams for p in glob.glob(os.path.join(a.data, f"heldout.{s}.*.npy"))
        )
        ids = np.concatenate([np.load(p) for p in paths])
        starts = np.flatnonzero((ids & (ANSWER - 1)) == 2)
        documents = [d for d in np.split(ids, starts[1:]) if len(d) > 1]
        if len(ids) > a.tokens:  # every n-th document
            documents = documents[:: -(-len(ids) // a.tokens)]
        right = tokens = right_said = said = 0
        for i in range(0, len(documents), 60):
            with tempfile.TemporaryDirectory() as folder:
                parts, command = {}, [
                    a.gemma, "eval", "-m", a.model, "--ctx-size", str(WINDOW), "--json", "--device",
                    "cpu",
                ]
                # two parts at least
                for n, d in enumerate(documents[i : i + 60] + [np.array([2, 1])]):
                    rows, known, answer, number = vocabulary.expand(
                        d & (ANSWER - 1), (d & ANSWER) > 0, np.arange(len(d))
                    )
                    parts[f"d{n}"] = rows, known, answer, number
                    path = os.path.join(folder, f"{n}.json")
                    with open(path, "w") as f:
                        json.dump({"ids": rows.tolist()}, f)
                    command += ["--ids", f"d{n}={path}"]
                found = json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                )["categories"]
            parts.popitem()
            for name, (rows, known, answer, number) in parts.items():
                top1 = np.array(found[name]["top1"])
                at = np.arange(len(rows))
                at = at[(at % WINDOW != 0) & (rows != 2)]  # the first of a window is not predicted
                first = np.r_[True, number[1:] != number[:-1]][at]
                hit = (top1[at - 1] == rows[at]) & known[at]
                right, tokens = right + hit.sum(), tokens + first.sum()
                right_said, said = right_said + hit[
                    answer[at]
                ].sum(), said + first[answer[at]].sum()
        line = f"{kind}: top-1 {right / tokens:.4f} of {tokens} tokens"
        if said:
            line += f", in answers {right_said / said:.4f} of {said}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
