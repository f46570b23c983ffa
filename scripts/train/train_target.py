"""Trains the target: `--stage stable` (full mix), then `--stage decay` (chats, fake-quantised, lr to 0).

    python train_target.py --data DIR --out RUN --stage stable --steps 4500
    python train_target.py --data DIR --out RUN --stage decay --steps 1500

Each step sees 64 rows of 2,048 tokens. Checkpoints: RUN/stable.pt, RUN/target.pt (every --save steps).
"""
import argparse
import os
import time

import torch

from data import MIXES, Mix
from model import Masks, Net
from optim import Optim

torch._dynamo.config.automatic_dynamic_shapes = False
torch._dynamo.config.cache_size_limit = 64


def make_loss(net, quant):
    @torch.compile
    def head(e, x, target, weight):
        logits = net.logits(e, x).float()
        lse = torch.logsumexp(logits, -1)
        picked = logits.gather(-1, target[..., None])[..., 0]
        total = weight.sum()
        ce = ((lse - picked) * weight).sum() / total
        return ce + 1e-5 * (lse.square() * weight).sum() / total, ce.detach()

    def loss(w, tokens, target, weight, masks):
        e = net.effective(w, quant)
        ends = {n: e[n] for n in ("model.norm.weight", "model.embed_tokens.weight")}
        return head(ends, net.hidden(e, tokens, masks), target, weight)

    return loss


def save(path, w, opt, step):
    torch.save({"weights": {n: t.detach() for n, t in w.items()}, "optim": opt.state(), "step": step}, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--stage", choices=("stable", "decay"), required=True)
    ap.add_argument("--steps", type=int, required=True)
    ap.add_argument("--start", help="checkpoint to start from (default for decay: OUT/stable.pt)")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1.0, help="factor on the learning rates")
    ap.add_argument("--save", type=int, default=500)
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    decay = a.stage == "decay"
    net = Net("demo-target")
    w = net.init(a.seed)
    opt = Optim(w)
    start = a.start or (os.path.join(a.out, "stable.pt") if decay else None)
    if start:
        state = torch.load(start, map_location="cuda")
        with torch.no_grad():
            for n, t in w.items():
                t.copy_(state["weights"][n])
        if "optim" in state:
            opt.load(state["optim"])
    mix = Mix(a.data, MIXES[a.stage], a.batch, a.seed + 100 * decay, answers_only=decay)
    masks, loss = Masks(a.batch), make_loss(net, quant=decay)
    path = os.path.join(a.out, "target.pt" if decay else "stable.pt")
    began = last = time.time()
    for step in range(a.steps):
        tokens, target, weight = mix.next()
        total, ce = loss(w, tokens, target, weight, masks(tokens))
        total.backward()
        opt.step(a.lr * ((1 - step / a.steps) if decay else min(1.0, (step + 1) / 150)))
        if step < 3 or (step + 1) % 100 == 0:
            value, now = ce.item(), time.time()
            rate = a.batch * 2048 * (100 if step > 100 else 1) / (now - last)
            last = now
            print(f"{a.stage} {step + 1}/{a.steps} loss {value:.4f} {now - began:.0f} s {rate / 1e3:.0f}k tok/s "
                  f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB", flush=True)
        if (step + 1) % a.save == 0 and step + 1 < a.steps:
            save(path, w, opt, step + 1)
    save(path, w, opt, a.steps)
    print("epochs", mix.epochs(), flush=True)
    print(f"DONE {a.stage} {time.time() - began:.0f} s, {a.steps * a.batch * 2048 / 1e6:.0f} M tokens", flush=True)


if __name__ == "__main__":
    main()
