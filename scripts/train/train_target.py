"""Trains the target: `--stage stable` (full mix), then `--stage decay` (chats, fake-quantised, lr
to 0). `--stage again` goes on from a finished target, to teach it more chats: fake-quantised, the
rate rises for 40 steps and falls to 0.

    torchrun --nproc-per-node GPUS train_target.py --data DIR --out RUN --stage stable --steps 5000
    torchrun --nproc-per-node GPUS train_target.py --data DIR --out RUN --stage decay --seconds 300
    python train_target.py --data DIR --out RUN --stage again --weights
    demo-target/model.safetensors --lr 0.6 --seconds 220

Each step sees 64 rows of 2,048 tokens, shared out among the GPUs, at most 32 at a time on each (34
GiB). Checkpoints: RUN/stable.pt, RUN/target.pt (every --save steps)."""
import argparse
import os
import time

import torch
from safetensors.torch import load_file

import ddp
from data import MIXES, Mix
from generate import dense_hidden
from hf_files import CONTEXT
from model import Masks, Net
from optim import Optim

torch._dynamo.config.automatic_dynamic_shapes = False
torch._dynamo.config.cache_size_limit = 64


def make_loss(net, quant, compiled):
    def head(e, x, target, weight):
        logits = net.logits(e, x).float()
        lse = torch.logsumexp(logits, -1)
        picked = logits.gather(-1, target[..., None])[..., 0]
        total = weight.sum()
        ce = ((lse - picked) * weight).sum() / total
        return ce + 1e-5 * (lse.square() * weight).sum() / total, ce.detach()

    head = torch.compile(head) if compiled else head

    def loss(w, tokens, target, weight, masks):
        e = net.effective(w, quant)
        ends = {n: e[n] for n in ("model.norm.weight", "model.embed_tokens.weight")}
        x = net.hidden(e, tokens, masks(tokens)) if masks else dense_hidden(net, e, tokens)
        return head(ends, x, target, weight)

    return loss


def warm(loss, w, masks, rows, device):
    """Compiles everything, on tokens of no meaning."""
    tokens = torch.full((rows, CONTEXT), 300, device=device)
    tokens[:, ::200] = 2
    loss(w, tokens, tokens, torch.ones(tokens.shape, device=device), masks)[0].backward()
    for p in w.values():
        p.grad = None


def save(path, w, opt, step):
    if ddp.RANK > 0:
        return
    torch.save(
        {"weights": {n: t.detach() for n, t in w.items()}, "optim": opt.state(), "step": step},
        path + ".tmp",
    )
    os.replace(path + ".tmp", path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--stage", choices=("stable", "decay", "again"), required=True)
    ap.add_argument("--steps", type=int)
    ap.add_argument("--seconds", type=float, help="as many steps as fit into so much time")
    ap.add_argument(
        "--until", type=float,
        help="in place of --seconds: a time of the clock, in seconds since 1970",
    )
    ap.add_argument(
        "--wait", help="gets ready, then waits for this file before it reads weights and rows"
    )
    ap.add_argument(
        "--weights",
        help="checkpoint, or exported weights, to start from (default for decay: OUT/stable.pt)",
    )
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1.0, help="factor on the learning rates")
    ap.add_argument("--save", type=int, default=500)
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    device = ddp.start()
    decay, again = a.stage != "stable", a.stage == "again"
    net = Net("demo-target", device)
    w = net.init(a.seed, device)
    opt = Optim(w)
    rows, turns = ddp.share(a.batch)
    masks, loss = Masks(rows) if device == "cuda" else None, make_loss(net, decay, device == "cuda")
    if a.wait:
        began = time.time()
        warm(loss, w, masks, rows, device)
        ddp.say(f"{a.stage} is ready after {time.time() - began:.0f} s")
        ddp.wait_for(a.wait)
    start = a.weights or (os.path.join(a.out, "stable.pt") if decay else None)
    if start:
        exported = start.endswith(".safetensors")
        state = {
            "weights": load_file(start, device=device)
        } if exported else torch.load(start, map_location=device)
        with torch.no_grad():
            for n, t in w.items():
                t.copy_(state["weights"][n])
        if "optim" in state:
            opt.load(state["optim"])
    mix = Mix(
        a.data, MIXES[a.stage], rows, a.seed + 100 * decay + 1000 * ddp.RANK, answers_only=decay,
        device=device,
    )
    path = os.path.join(a.out, "target.pt" if decay else "stable.pt")
    clock, step = ddp.Clock(a.steps, a.until - time.time() if a.until else a.seconds), 0
    began = last = time.time()
    while clock.more(step):
        for _ in range(turns):
            tokens, target, weight = mix.next()
            total, ce = loss(w, tokens, target, weight, masks)
            (total / turns).backward()
        ddp.average(opt.all)
        rise = 1.0 if a.stage == "decay" else min(1.0, (step + 1) / (40 if again else 150))
        opt.step(a.lr * rise * ((1 - clock.done(step)) if decay else 1.0))
        step += 1
        if step < 4 or step % 100 == 0:
            value, now = ce.item(), time.time()
            rate = a.batch * 2048 * (100 if step > 100 else 1) / (now - last)
            last = now
            ddp.say(f"{a.stage} {step}/{clock.steps} loss {value:.4f} {now - began:.0f} s "
                    f"{rate / 1e3:.0f}k tok/s "
                    f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
        if step % a.save == 0:
            save(path, w, opt, step)
    save(path, w, opt, step)
    ddp.say("epochs", {n: round(ddp.WORLD * e, 2) for n, e in mix.epochs().items()})
    ddp.say(
        f"DONE {a.stage} {time.time() - began:.0f} s, {step * a.batch * 2048 / 1e6:.0f} M tokens"
    )
    ddp.finish()


if __name__ == "__main__":
    main()
