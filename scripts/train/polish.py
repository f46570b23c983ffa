"""Last, short stage on a CPU: the hand-written chats (two thirds) and short chats and text of the corpus.

    python polish.py --stage target --models DIR --tokenizer tokenizer.json --corpus CORPUS --seeds seeds --steps 380
    python polish.py --stage draft ...        (soft labels of the polished target)

Reads and replaces DIR/demo-target or DIR/demo-draft model.safetensors; fake-quantised throughout.
"""
import argparse
import itertools
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import pack
from chats import classify, clean
from corpus import documents, shards
from generate import dense_hidden
from hf_files import to_bf16, write_safetensors
from model import Net

LENGTH = 257


def batches(a, rows):
    """Endless (tokens, targets, weights) of `rows` rows of 256 ids, packed by document."""
    rng = random.Random(a.seed)
    pack.ROW = LENGTH
    seeds = [p for p in pack.seed_pieces(a.seeds) if len(p[0]) <= LENGTH]
    real, text = [], []
    for path in shards(a.corpus, "train", "instruct"):
        for d in documents(path)[:: 3]:
            if len(d) < 900 and classify(d) in ("qa", "math", "tpl", "codeqa") and clean(classify(d), d):
                real.append(d)
    for kind in ("docs", "prose", "code"):
        docs = documents(shards(a.corpus, "train", kind)[0])
        text += [d[:1000] for d in rng.sample(docs, 700)]
    rng.shuffle(real)
    real = [(i, pack.turn_mask(i)) for i in (pack.encode("<bos>" + d.strip() + "\n") for d in real[:5000]) if len(i) <= LENGTH]
    text = [(i, np.ones(len(i), bool)) for i in (np.concatenate([[pack.BOS], pack.encode(d)])[:LENGTH].astype(np.int16) for d in text)]
    print(f"{len(seeds)} hand-written chats, {len(real)} chats, {len(text)} texts", flush=True)
    sets = []
    for step in itertools.count():
        for n, pool in enumerate((seeds, real, text)):
            if len(sets) <= n:
                sets.append(None)
            if sets[n] is None or sets[n][1] >= len(sets[n][0][0]):
                sets[n] = [pack.pack(list(pool), rng), 0]
        seeded = round(rows * 0.7)
        take = [(0, seeded), (1 + step % 2, rows - seeded)]  # the rest: chats and text in turns
        ids, masks = [], []
        for n, k in take:
            (r, m), at = sets[n]
            ids.append(r[at : at + k])
            masks.append(m[at : at + k])
            sets[n][1] = at + k
        ids, masks = np.concatenate(ids), np.concatenate(masks)
        t = torch.from_numpy(ids.astype(np.int64))
        w = torch.from_numpy(masks[:, 1:]) & (t[:, 1:] != 0) & (t[:, 1:] != 2)
        yield t[:, :-1], t[:, 1:], w.float()


def load(folder, name):
    return {n: t.float() for n, t in load_file(os.path.join(folder, name, "model.safetensors")).items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--stage", choices=("target", "draft"), required=True)
    ap.add_argument("--models", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--seeds", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--steps", type=int, required=True)
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--rows", type=int, default=4, help="rows of 256 ids per step")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--seed", type=int, default=4)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    pack.start(a.tokenizer)
    name = "demo-" + a.stage
    net, w = Net(name, "cpu"), load(a.models, name)
    if a.stage == "draft":
        teacher = Net("demo-target", "cpu")
        with torch.no_grad():
            et = {n: t.detach() for n, t in teacher.effective(load(a.models, "demo-target"), True).items()}
    for t in w.values():
        t.requires_grad_()
    opt = torch.optim.AdamW(w.values(), lr=a.lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=True)
    began = time.time()
    for step, (tokens, target, weight) in zip(range(a.steps), batches(a, a.rows)):
        e = net.effective(w, True)
        keep = weight.flatten().nonzero()[:, 0]
        y = net.logits(e, dense_hidden(net, e, tokens).flatten(0, 1)[keep]).float()
        if a.stage == "target":
            loss = F.cross_entropy(y, target.flatten()[keep])
        else:
            with torch.no_grad():
                t = teacher.logits(et, dense_hidden(teacher, et, tokens).flatten(0, 1)[keep]).float().log_softmax(-1)
            loss = F.kl_div(y.log_softmax(-1), t, log_target=True, reduction="batchmean")
        loss.backward()
        for g in opt.param_groups:
            g["lr"] = a.lr * min((step + 1) / 15, 1 - step / a.steps)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step < 2 or (step + 1) % 10 == 0:
            print(f"{name} {step + 1}/{a.steps} loss {loss.item():.4f} {time.time() - began:.0f} s", flush=True)
    tensors = {n: to_bf16(t.detach().numpy()) for n, t in w.items()}
    os.makedirs(os.path.join(a.out, name), exist_ok=True)
    write_safetensors(os.path.join(a.out, name, "model.safetensors"), tensors)
    print(f"DONE {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
