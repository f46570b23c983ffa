"""Trains a draft for Gemma 3: stable stage at a constant rate, then decay to 0 with 4-bit fake
quantisation.

    python draft_train.py --data DATA --vocab draft_vocabulary.json --tokenizer tokenizer.json
    --shape small --steps 6000 --out RUN/small

Several GPUs: `torchrun --nproc-per-node N draft_train.py ...` (gradients are averaged; each sees
batches of its own). In place of --steps, --until T ends at a time (seconds since 1970) and prints
the steps that this took. Writes OUT.pt and OUT.json (figures on the held-out streams of DATA, plain
and fake-quantised)."""
import argparse
import dataclasses
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist

from draft_feed import DECAY, FIRST, KNOWN, ROW, STABLE, Feed
from draft_net import SHAPES, DraftNet, Mask
from draft_tokens import ANSWER
from draft_vocab import Vocabulary, pieces_of
from optim import Optim

torch._dynamo.config.automatic_dynamic_shapes = False
torch._dynamo.config.cache_size_limit = 64
torch.set_float32_matmul_precision("high")
ENDS = ("model.norm.weight", "model.embed_tokens.weight")
KINDS = {"code": ("code",), "docs": ("docs",), "prose": ("prose",), "instruct": ("chat", "derived")}


def ends(e):
    return {n: e[n] for n in ENDS}


def make_loss(net, teacher=None, share=0.0):
    """Cross-entropy with a small penalty on the normaliser; with a teacher, `share` of it replaced
    by the divergence from it."""

    def head(e, x, target, weight, quant, et, xt):
        logits = net.logits(e, x, quant).float()
        lse = torch.logsumexp(logits, -1)
        total = weight.sum()
        ce = ((lse - logits.gather(-1, target[..., None])[..., 0]) * weight).sum() / total
        loss = ce + 1e-5 * (lse.square() * weight).sum() / total
        if teacher is not None:
            t = teacher.logits(et, xt).float()
            t = t - torch.logsumexp(t, -1, keepdim=True)
            kl = ((t.exp() * (t - logits + lse[..., None])).sum(-1) * weight).sum() / total
            loss = (1 - share) * loss + share * kl
        return loss, ce.detach()

    return torch.compile(head) if net.device == "cuda" else head


def unpack(rows, user_weight):
    """tokens, targets and loss weights: no loss on <bos>, on ids outside the vocabulary, and less
    on what users say."""
    tokens, target = (rows[:, :-1] & ROW).long(), rows[:, 1:]
    row = target & ROW
    weight = ((target & KNOWN) > 0) & (row != 2)
    weight = weight.float()
    if user_weight != 1.0:
        chat = ((rows & ANSWER) > 0).any(1, keepdim=True)
        weight = torch.where(chat & ((target & ANSWER) == 0), weight * user_weight, weight)
    return tokens, row.long(), weight


@torch.no_grad()
def evaluate(net, w, feed, mask, batch, quant):
    """Per kind: nats per known token, share of all tokens (unknown ones count as wrong) where the
    best guess is right."""
    e, out = net.effective(w, quant), {}
    for kind, streams in KINDS.items():
        loss = known = right = right4 = ids = a_right = a_ids = 0.0
        for rows in (r for s in streams if s in feed.flat for r in feed.rows(s).split(batch)):
            n = len(rows)
            rows = torch.cat([rows, rows[:1].expand(batch - n, -1)]) if n < batch else rows
            tokens, target, weight = unpack(rows, 1.0)
            hidden = net.hidden(e, tokens, mask(tokens), quant)
            for part in torch.arange(n, device=rows.device).split(16):
                y, t, c, flags = net.logits(
                    e, hidden[part], quant
                ).float(), target[part], weight[part], rows[part, 1:]
                nll = torch.logsumexp(y, -1) - y.gather(-1, t[..., None])[..., 0]
                hit, hit4 = (y.argmax(-1) == t) * c, (y.topk(4).indices == t[..., None]).any(-1) * c
                counted, answer = ((flags & FIRST) > 0) & (t != 2), (flags & ANSWER) > 0
                loss, known = loss + (nll * c).sum().item(), known + c.sum().item()
                right, right4 = right + hit.sum().item(), right4 + hit4.sum().item()
                ids += counted.sum().item()
                a_right, a_ids = a_right + (hit * answer).sum().item(), a_ids + (
                    counted & answer
                ).sum().item()
        if ids:
            out[kind] = {
                "top1": round(right / ids, 4), "top4": round(right4 / ids, 4),
                "loss": round(loss / known, 4), "tokens": int(ids),
            }
        if a_ids:
            out[kind]["answers_top1"] = round(a_right / a_ids, 4)
    return out


def line(figures):
    return ", ".join(f"{k} {v['top1']:.4f}" + (f" (answers "
                                               f"{v['answers_top1']:.4f})" if "answers_top1" in v
                                                   else "")
                     for k, v in figures.items())


def load_teacher(path, device):
    state = torch.load(path, map_location=device)
    net = DraftNet(SHAPES["small"].__class__(**state["shape"]), device)
    with torch.no_grad():
        return net, net.effective({n: t.float() for n, t in state["weights"].items()}, False)


def with_share(shares, changes):
    """The shares with those of `changes` (`stream=part`) set, the others scaled to make one in
    all."""
    fixed = {s: float(p) for s, p in (c.split("=") for c in changes)}
    rest = (1 - sum(fixed.values())) / sum(p for s, p in shares.items() if s not in fixed)
    return {s: fixed.get(s, p * rest) for s, p in shares.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--vocab", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument(
        "--shape", default="small",
        help="a name of draft_net.SHAPES, then ,field=number for changes",
    )
    ap.add_argument("--out", required=True)
    ap.add_argument("--steps", type=int, default=0)
    ap.add_argument("--until", type=float, default=0)
    ap.add_argument("--batch", type=int, default=96, help="rows a step and GPU")
    ap.add_argument("--length", type=int, default=1024)
    ap.add_argument("--decay", type=float, default=0.25, help="share of the steps")
    ap.add_argument("--no-qat", action="store_true")
    ap.add_argument(
        "--user-weight", type=float, default=1.0,
        help="loss weight of what users say, in the decay stage",
    )
    ap.add_argument("--teacher", help="checkpoint to learn from in the last --teacher-part of the "
                                      "steps, once it exists; read again when it changes")
    ap.add_argument("--teacher-part", type=float, default=0.5)
    ap.add_argument("--teacher-share", type=float, default=0.7)
    ap.add_argument(
        "--share", action="append", default=[], metavar="STREAM=PART",
        help="of the crops, in both stages; the other streams share the rest",
    )
    ap.add_argument("--lr", type=float, default=1.0)
    ap.add_argument(
        "--snapshot", type=float, default=0.0,
        help="write OUT.mid.pt after each such share of the steps",
    )
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--device", default="cuda")
    ap.add_argument(
        "--wait", type=int, default=0, help="start only when this many million tokens are there"
    )
    a = ap.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if a.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        dist.init_process_group("nccl")
    say = lambda *t: print(f"[{os.path.basename(a.out)}]", *t, flush=True) if rank == 0 else None
    began = time.time()
    parts = a.vocab + ".parts.npy"  # `Vocabulary.parts`, where someone saved it to start sooner
    vocabulary = Vocabulary(a.vocab, None if os.path.exists(parts) else pieces_of(a.tokenizer))
    if os.path.exists(parts):
        vocabulary.parts = np.load(parts)
    name, *changes = a.shape.split(",")
    shape = dataclasses.replace(
        SHAPES[name], vocab=len(vocabulary),
        **{k: int(v) for k, v in (c.split("=") for c in changes)},
    )
    say(shape, f"{shape.parameters() / 1e6:.2f} M parameters")
    net = DraftNet(shape, a.device, a.length)
    w = net.init(a.seed)
    opt = Optim(w)
    feed = Feed(a.data, vocabulary, a.length, a.seed * 1000 + rank, device=a.device)
    shares = [with_share(s, a.share) for s in (STABLE, DECAY)]
    mask, loss_of, teacher, et = Mask(
        shape, a.batch, a.length, int(vocabulary.row[2]), a.device
    ), make_loss(net), None, None

    def step(rows, quant, factor, user_weight):
        tokens, target, weight = unpack(rows, user_weight)
        e, m = net.effective(w, quant), mask(tokens)
        xt = None
        if teacher is not None:
            with torch.no_grad():
                xt = teacher.hidden(et, tokens, m)
        loss, ce = loss_of(
            ends(e), net.hidden(e, tokens, m, quant), target, weight, quant,
            None if et is None else ends(et), xt,
        )
        loss.backward()
        if world > 1:
            flat = torch.cat([t.grad.flatten() for t in opt.all])
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)
            for t, g in zip(opt.all, flat.split([t.numel() for t in opt.all])):
                t.grad = g.view_as(t)
        opt.step(factor)
        return ce

    # Compiles on noise while the first shards are still being tokenised; a rate of 0 changes no
    # weight.
    noise = torch.randint(
        500, len(vocabulary), (a.batch, a.length + 1), device=a.device, dtype=torch.int32
    ) | KNOWN | FIRST
    for quant in (False,) if a.no_qat or a.device != "cuda" else (False, True):
        step(noise, quant, 0.0, 1.0).item()
    opt = Optim(w)
    say(f"compiled, {time.time() - began:.0f} s")
    while feed.refresh() < max(1, a.wait * 1e6):
        time.sleep(0.3)
    if world > 1:
        dist.barrier()
    say(f"{sum(map(len, feed.flat.values())) / 1e6:.1f} M rows to begin with, "
        f"{time.time() - began:.0f} s")
    total, start, at, read = a.steps, time.time(), 0, None
    while not total or at < total:
        if total == 0 and at == 120:
            rate = (time.time() - mark) / 100
            # Fake quantisation makes the last part slower; the rest is slack.
            left = (a.until - time.time() - 6) / (rate * (1 + 0.12 * a.decay))
            count = torch.tensor([at + int(left)], device=a.device)
            if world > 1:
                dist.broadcast(count, 0)
            total = int(count)
            say(f"{rate * 1e3:.0f} ms a step: {total} steps")
        if at == 20:
            mark = time.time()
        if at % 50 == 0:
            feed.refresh()
        progress = at / total if total else 0.0
        decaying = progress > 1 - a.decay
        if a.teacher and progress > 1 - a.teacher_part and at % 50 == 0 and os.path.exists(
            a.teacher
        ):
            written = os.path.getmtime(a.teacher)
            if teacher is None:
                teacher, et = load_teacher(a.teacher, a.device)
                loss_of = make_loss(net, teacher, a.teacher_share)
                say(f"learning from {a.teacher} from step {at}")
            elif written != read:
                et = load_teacher(a.teacher, a.device)[1]
            read = written
        factor = a.lr * min((at + 1) / 100, (1 - progress) / a.decay if decaying else 1.0)
        ce = step(feed.batch(a.batch, shares[decaying]), decaying and not a.no_qat, factor,
                  a.user_weight if decaying else 1.0)
        at += 1
        if at in (1, 20) or at % 200 == 0:
            passed = time.time() - start
            say(f"step {at}/{total} loss {ce.item():.4f} {passed:.0f} s, "
                f"{world * at * a.batch * a.length / passed / 1e3:.0f}k tok/s")
        if a.snapshot and total and rank == 0 and at % max(1, int(a.snapshot * total)) == 0:
            save(a.out + ".mid.pt", w, shape)
    say(f"trained {total} steps, {world * total * a.batch * a.length / 1e6:.0f} M rows, "
        f"{time.time() - start:.0f} s, epochs "
        f"{ {s: round(world * n, 2) for s, n in feed.epochs().items()} }")
    if rank == 0:
        save(a.out + ".pt", w, shape)
        held = Feed(a.data, vocabulary, a.length, 0, "heldout", a.device)
        held.refresh()
        if a.device == "cuda":
            torch.cuda.empty_cache()
        figures = {
            "plain": evaluate(net, w, held, mask, a.batch, False),
            "quantised": evaluate(net, w, held, mask, a.batch, True),
        }
        report = {"args": vars(a), "world": world, "steps": total, "parameters": shape.parameters(),
                  "rows": world * total * a.batch * a.length,
                  "seconds": round(time.time() - start, 1), "figures": figures}
        with open(a.out + ".json", "w") as f:
            json.dump(report, f, indent=1)
        for what, r in figures.items():
            say(f"RESULT {what}: {line(r)}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def save(path, w, shape):
    state = {
        "shape": dataclasses.asdict(shape),
        "weights": {n: t.detach().bfloat16() for n, t in w.items()},
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


if __name__ == "__main__":
    main()
