"""Lets the target answer prompts of the training chats, and packs its answers for the draft's training.

    torchrun --nproc-per-node GPUS own.py --data DIR --tokenizer tokenizer.json --target RUN/target.pt --out DIR --prompts 16000

Each process takes its share of the prompts and writes rows of its own, own.RANK.npy.
"""
import argparse
import os
import random
import time

import numpy as np
import torch

import ddp
import pack
from generate import effective, generate
from model import Net

CLASSES = {"chat-seed": 1.0, "chat-define": 1.0, "chat-qa": 2.0, "chat-tpl": 1.0, "chat-codeqa": 1.5,
           "chat-exercise": 0.5, "chat-math": 0.5, "chat-dialogue": 0.3}


def prompts_of(rows, model_id):
    """First user turns (with the start of the answer) of the chats in packed rows."""
    for row in rows:
        bos = np.flatnonzero(row == pack.BOS)
        for s, e in zip(bos, list(bos[1:]) + [len(row)]):
            doc = row[s:e]
            ends = np.flatnonzero(doc == pack.EOT)
            if len(ends) and ends[0] + 4 < len(doc) and doc[ends[0] + 3] == model_id and ends[0] < 380:
                yield doc[: ends[0] + 5].tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--target", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--prompts", type=int, default=16000)
    ap.add_argument("--new", type=int, default=320)
    ap.add_argument("--batch", type=int, default=1024)
    ap.add_argument("--seconds", type=float, default=float("inf"), help="starts no batch after so much time")
    a = ap.parse_args()
    ddp.start()
    pack.start(a.tokenizer)
    model_id, rng = pack.TOK.token_to_id("model"), random.Random(5)
    chosen, names = [], [n for n in CLASSES if os.path.exists(os.path.join(a.data, n + ".npy"))]
    for n in names:
        all_rows = np.load(os.path.join(a.data, n + ".npy"))
        want = int(a.prompts * CLASSES[n] / sum(CLASSES[m] for m in names))
        found = list(prompts_of(all_rows[: 1 + want * 2], model_id))
        rng.shuffle(found)
        chosen += found[:want]
    rng.shuffle(chosen)
    chosen = chosen[ddp.RANK :: ddp.WORLD]
    # A batch holds prompts of about one length; the batches are shuffled, for the time may not suffice for all.
    chosen.sort(key=len)
    batches = [chosen[i : i + a.batch] for i in range(0, len(chosen), a.batch)]
    rng.shuffle(batches)
    net = Net("demo-target")
    e = effective(net, torch.load(a.target, map_location="cuda")["weights"])
    pieces, began = [], time.time()
    for i, part in enumerate(batches):
        if time.time() - began > a.seconds:
            break
        out = generate(net, e, part, a.new, temperature=1.0 if i % 3 == 2 else 0.0, seed=i)
        for p, o in zip(part, out):
            ids = np.array(p + o + ([pack.TOK.token_to_id("\n")] if o[-1] == pack.EOT else []), np.int16)
            pieces.append((ids, pack.turn_mask(ids)))
    print(f"{len(pieces)} answers, {sum(len(p[0]) for p in pieces) / 1e6:.1f} M tokens, {time.time() - began:.0f} s")
    print(pack.save(a.out, f"own.{ddp.RANK}", pieces, rng), flush=True)
    ddp.finish()


if __name__ == "__main__":
    main()
