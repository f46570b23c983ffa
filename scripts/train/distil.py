"""Trains the draft on what the target wrote itself (own.py): on the 16 likeliest tokens behind each
place, and on the first choice.

    torchrun --nproc-per-node GPUS distil.py --data DATA --out RUN --seconds 240 \\
        [--weights draft.safetensors]

Fake-quantised from the first step on; the rate rises for 100 steps, stays, and falls to 0 from
--fall on. The target is not needed any more, so a step is the small model's alone.

The loss is the divergence from the target's likeliest tokens, plus the chance that a token drawn
from the draft is not the target's first choice. The divergence alone spends a small model's
strength on places where nothing can be guessed; the second part is flat there, and steep where the
first choice is about to be won.
"""

import argparse
import os
import time

import torch

import ddp
from data import Own
from generate import dense_hidden
from hf_files import CONTEXT
from model import Masks, Net
from optim import Optim
from own import weights
from slots import TOP, WRITTEN
from train_target import save

torch._dynamo.config.automatic_dynamic_shapes = False
torch._dynamo.config.cache_size_limit = 64
ENDS = ("model.norm.weight", "model.embed_tokens.weight")


def make_loss(draft, miss_part, compiled):
    def head(e, x, top, chance, weight):
        s = draft.logits(e, x).float()
        likely = s.gather(-1, top)
        guess = likely - torch.logsumexp(s, -1, keepdim=True)
        wanted = chance - torch.logsumexp(chance, -1, keepdim=True)
        total, first = weight.sum() + 1e-6, guess[..., 0]
        kl = ((wanted.exp() * (wanted - guess)).sum(-1) * weight).sum() / total
        miss = ((1 - first.exp()) * weight).sum() / total
        own = (weight == 1).float()
        right = ((likely[..., 0] >= s.amax(-1)).float() * own).sum() / (own.sum() + 1e-6)
        return kl + miss_part * miss, kl.detach(), miss.detach(), right.detach()

    head = torch.compile(head) if compiled else head

    def step(w, masks, tokens, top, chance, weight):
        e = draft.effective(w, True)
        x = draft.hidden(e, tokens, masks(tokens)) if masks else dense_hidden(draft, e, tokens)
        return head({n: e[n] for n in ENDS}, x, top, chance, weight)

    return step


def warm(run, w, masks, rows, device):
    """Compiles everything, on tokens of no meaning."""
    shape = (rows, CONTEXT)
    tokens = torch.full(shape, 300, device=device)
    tokens[:, ::200] = 2
    top = torch.arange(TOP, device=device).expand(*shape, TOP).contiguous()
    run(
        w,
        masks,
        tokens,
        top,
        torch.zeros(*shape, TOP, device=device),
        torch.ones(shape, device=device),
    )[0].backward()
    for p in w.values():
        p.grad = None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--weights", help="exported draft to start from")
    ap.add_argument("--steps", type=int)
    ap.add_argument("--seconds", type=float)
    ap.add_argument(
        "--until",
        type=float,
        help="in place of --seconds: a time of the clock, in seconds since 1970",
    )
    ap.add_argument("--wait", help="gets ready, then waits for this file before it reads the rows")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1.0)
    ap.add_argument(
        "--fall", type=float, default=0.35, help="share of the steps after which the rate falls"
    )
    ap.add_argument(
        "--miss", type=float, default=1.0, help="weight of the chance to miss the first choice"
    )
    ap.add_argument("--read", type=float, default=0.1, help="weight of the prompts' tokens")
    ap.add_argument("--eager", action="store_true", help="compiles the layers alone")
    ap.add_argument("--save", type=int, default=2000)
    ap.add_argument("--seed", type=int, default=2)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    device = ddp.start()
    draft = Net("demo-draft", device)
    w = draft.init(a.seed, device)
    if a.weights:
        with torch.no_grad():
            for n, t in weights(a.weights, device).items():
                w[n].copy_(t)
    opt = Optim(w)
    rows, turns = ddp.share(a.batch)
    masks, run = (
        Masks(rows) if device == "cuda" else None,
        make_loss(draft, a.miss, device == "cuda" and not a.eager),
    )
    if a.wait:
        began = time.time()
        warm(run, w, masks, rows, device)
        ddp.say(f"distil is ready after {time.time() - began:.0f} s")
        ddp.wait_for(a.wait)
    began = time.time()
    own = Own(a.data, a.read, a.seed + 1000 * ddp.RANK, device)
    share = (own.kind == WRITTEN).float().mean().item()
    ddp.say(
        f"{len(own)} rows, {len(own) * CONTEXT / 1e6:.0f} M tokens, "
        f"of which the target wrote {share:.2f}; read in {time.time() - began:.0f} s"
    )
    clock, step = ddp.Clock(a.steps, a.until - time.time() if a.until else a.seconds), 0
    began = time.time()
    while clock.more(step):
        for _ in range(turns):
            total, *parts = run(w, masks, *own.next(rows))
            (total / turns).backward()
        ddp.average(opt.all)
        opt.step(a.lr * min(1.0, (step + 1) / 100, (1 - clock.done(step)) / (1 - a.fall)))
        step += 1
        if step < 3 or step % 200 == 0:
            kl, miss, right = (p.item() for p in parts)
            ddp.say(
                f"distil {step}/{clock.steps} kl {kl:.4f} miss {miss:.4f} "
                f"first choice right {right:.4f} {time.time() - began:.0f} s"
            )
        if step % a.save == 0:
            save(os.path.join(a.out, "draft.pt"), w, opt, step)
    save(os.path.join(a.out, "draft.pt"), w, opt, step)
    ddp.say(
        f"DONE distil {time.time() - began:.0f} s, {step * a.batch * CONTEXT / 1e6:.0f} M tokens, "
        f"{ddp.WORLD * own.epochs():.2f} epochs"
    )
    ddp.finish()


if __name__ == "__main__":
    main()
