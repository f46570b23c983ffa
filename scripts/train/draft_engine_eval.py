"""Held-out figures of a quantised draft as the program itself computes it: `gemma eval` on rows of the draft's vocabulary.

    python draft_engine_eval.py --gemma target/release/gemma --model DIR --data DATA --tokenizer tokenizer.json [--tokens 200000]

Windows of 1,024 rows from an empty cache; a window may span documents (draft_train.py keeps them apart). All tokens of the text
count; those outside the vocabulary are never guessed.
"""
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
        paths = sorted(p for s in streams for p in glob.glob(os.path.join(a.data, f"heldout.{s}.*.npy")))
        ids = np.concatenate([np.load(p) for p in paths])
        if len(ids) > a.tokens:  # windows spread over the whole
            windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
            ids = windows[np.linspace(0, len(windows) - 1, a.tokens // WINDOW).astype(int)].ravel()
        ids, answer = ids & (ANSWER - 1), (ids & ANSWER) > 0
        number = np.arange(len(ids))
        rows, known, answer, number = vocabulary.expand(ids, answer, number)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
            json.dump({"ids": rows.tolist()}, f)
            f.flush()
            out = subprocess.run([a.gemma, "eval", "-m", a.model, "--ids", f.name, "--ctx-size", str(WINDOW), "--json", "--device", "cpu"],
                                 check=True, capture_output=True, text=True).stdout
        top1 = np.array(json.loads(out)["top1"])
        at = np.flatnonzero(np.arange(len(rows)) % WINDOW != 0)  # the first of a window is not predicted
        at = at[rows[at] != 2]
        first = np.r_[True, number[1:] != number[:-1]][at]
        right = (top1[at - 1] == rows[at]) & known[at]
        line = f"{kind}: top-1 {right.sum() / first.sum():.4f} of {first.sum()} tokens"
        if answer.any():
            said = answer[at]
            line += f", in answers {right[said].sum() / first[said].sum():.4f} of {first[said].sum()}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
