"""Trains the draft on the frozen, fake-quantised target: soft labels over the whole vocabulary plus some text.

    torchrun --nproc-per-node GPUS distil.py --data DIR --out RUN --target RUN/target.pt --steps 1600 --quant-steps 900

The first --steps run unquantised at a constant rate, the --quant-steps fake-quantised with the rate going to 0;
--seconds and --quant-seconds take as many as fit.
"""
import argparse
import os
import time

import torch

import ddp
from data import MIXES, Mix
from generate import effective
from model import Masks, Net
from optim import Optim
from train_target import save

torch._dynamo.config.automatic_dynamic_shapes = False
torch._dynamo.config.cache_size_limit = 64


ENDS = ("model.norm.weight", "model.embed_tokens.weight")


def make_loss(draft, target, teacher, quant):
    @torch.compile
    def head(es, xs, et, xt, answer, weight):
        s = draft.logits(es, xs).float()
        s = s - torch.logsumexp(s, -1, keepdim=True)
        t = target.logits(et, xt).float()
        t = t - torch.logsumexp(t, -1, keepdim=True)
        total = weight.sum()
        kl = ((t.exp() * (t - s)).sum(-1) * weight).sum() / total
        ce = -(s.gather(-1, answer[..., None])[..., 0] * weight).sum() / total
        return 0.9 * kl + 0.1 * ce, kl.detach(), ce.detach()

    def step(w, tokens, answer, weight, masks):
        with torch.no_grad():
            xt = target.hidden(teacher, tokens, masks)
        e = draft.effective(w, quant)
        xs = draft.hidden(e, tokens, masks)
        return head({n: e[n] for n in ENDS}, xs, {n: teacher[n] for n in ENDS}, xt, answer, weight)

    return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--target", required=True)
    ap.add_argument("--steps", type=int)
    ap.add_argument("--quant-steps", type=int)
    ap.add_argument("--seconds", type=float)
    ap.add_argument("--quant-seconds", type=float)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1.3)
    ap.add_argument("--seed", type=int, default=2)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    ddp.start()
    target, draft = Net("demo-target"), Net("demo-draft")
    teacher = effective(target, torch.load(a.target, map_location="cuda")["weights"])
    w = draft.init(a.seed)
    opt = Optim(w)
    (rows, turns), seen = ddp.share(a.batch), 0
    mix = Mix(a.data, MIXES["distil"], rows, a.seed + 1000 * ddp.RANK, answers_only=True)
    masks, began = Masks(rows), time.time()
    for quant, steps, seconds in ((False, a.steps, a.seconds), (True, a.quant_steps, a.quant_seconds)):
        run, clock, step = make_loss(draft, target, teacher, quant), ddp.Clock(steps, seconds), 0
        while clock.more(step):
            for _ in range(turns):
                tokens, answer, weight = mix.next()
                total, kl, ce = run(w, tokens, answer, weight, masks(tokens))
                (total / turns).backward()
            ddp.average(opt.all)
            opt.step(a.lr * ((1 - clock.done(step)) if quant else min(1.0, (step + 1) / 100)))
            step += 1
            if step < 3 or step % 100 == 0:
                ddp.say(f"distil quant={quant} {step}/{clock.steps} kl {kl.item():.4f} ce {ce.item():.4f} {time.time() - began:.0f} s")
        seen += step
        save(os.path.join(a.out, "draft.pt"), w, opt, step)
    ddp.say("epochs", {n: round(ddp.WORLD * e, 2) for n, e in mix.epochs().items()})
    ddp.say(f"DONE distil {time.time() - began:.0f} s, {seen * a.batch * 2048 / 1e6:.0f} M tokens")
    ddp.finish()


if __name__ == "__main__":
    main()
