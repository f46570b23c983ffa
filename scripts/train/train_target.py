"""Trains the target: `--stage stable` (full mix), then `--stage decay` (chats, fake-quantised, lr to 0).

    torchrun --nproc-per-node GPUS train_target.py --data DIR --out RUN --stage stable --steps 5000
    torchrun --nproc-per-node GPUS train_target.py --data DIR --out RUN --stage decay --seconds 300

Each step sees 64 rows of 2,048 tokens, shared out among the GPUs, at most 32 at a time on each (34 GiB). Checkpoints: RUN/stable.pt, RUN/target.pt (every --save steps).
"""
import argparse
import os
import time

import torch
from safetensors.torch import load_file

import ddp
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
    if ddp.RANK > 0:
        return
    torch.save({"weights": {n: t.detach() for n, t in w.items()}, "optim": opt.state(), "step": step}, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--stage", choices=("stable", "decay"), required=True)
    ap.add_argument("--steps", type=int)
    ap.add_argument("--seconds", type=float, help="as many steps as fit into so much time")
    ap.add_argument("--weights", help="checkpoint, or exported weights, to start from (default for decay: OUT/stable.pt)")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1.0, help="factor on the learning rates")
    ap.add_argument("--save", type=int, default=500)
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    ddp.start()
    decay = a.stage == "decay"
    net = Net("demo-target")
    w = net.init(a.seed)
    opt = Optim(w)
    start = a.weights or (os.path.join(a.out, "stable.pt") if decay else None)
    if start:
        exported = start.endswith(".safetensors")
        state = {"weights": load_file(start, device="cuda")} if exported else torch.load(start, map_location="cuda")
        with torch.no_grad():
            for n, t in w.items():
                t.copy_(state["weights"][n])
        if "optim" in state:
            opt.load(state["optim"])
    rows, turns = ddp.share(a.batch)
    mix = Mix(a.data, MIXES[a.stage], rows, a.seed + 100 * decay + 1000 * ddp.RANK, answers_only=decay)
    masks, loss = Masks(rows), make_loss(net, quant=decay)
    path = os.path.join(a.out, "target.pt" if decay else "stable.pt")
    clock, step = ddp.Clock(a.steps, a.seconds), 0
    began = last = time.time()
    while clock.more(step):
        for _ in range(turns):
            tokens, target, weight = mix.next()
            total, ce = loss(w, tokens, target, weight, masks(tokens))
            (total / turns).backward()
        ddp.average(opt.all)
        opt.step(a.lr * ((1 - clock.done(step)) if decay else min(1.0, (step + 1) / 150)))
        step += 1
        if step < 4 or step % 100 == 0:
            value, now = ce.item(), time.time()
            rate = a.batch * 2048 * (100 if step > 100 else 1) / (now - last)
            last = now
            ddp.say(f"{a.stage} {step}/{clock.steps} loss {value:.4f} {now - began:.0f} s {rate / 1e3:.0f}k tok/s "
                    f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
        if step % a.save == 0:
            save(path, w, opt, step)
    save(path, w, opt, step)
    ddp.say("epochs", {n: round(ddp.WORLD * e, 2) for n, e in mix.epochs().items()})
    ddp.say(f"DONE {a.stage} {time.time() - began:.0f} s, {step * a.batch * 2048 / 1e6:.0f} M tokens")
    ddp.finish()


if __name__ == "__main__":
    main()
