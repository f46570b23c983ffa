"""Held-out figures of target and draft, their agreement on the target's own answers, and sample answers.

    python evaluate.py --data DIR --models DIR --questions questions.txt --out DIR

With --device cpu --rows 16 --prompts 24 it runs, on fewer texts, without a GPU. Reads the exported bf16 weights (what the quantiser gets) and evaluates them as they are and fake-quantised.
"""
import argparse
import json
import os

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import pack
from agree import chain
from data import Rows
from generate import dense_hidden, generate
from hf_files import CONTEXT
from model import Masks, Net

torch._dynamo.config.automatic_dynamic_shapes = False
torch._dynamo.config.cache_size_limit = 64
BATCH, DEVICE = 32, "cuda"


class Scorer:
    """Logits of packed rows."""

    def __init__(self, net):
        self.net, self.masks = net, Masks(BATCH) if DEVICE == "cuda" else None

    @torch.no_grad()
    def __call__(self, e, tokens):
        n = len(tokens)
        if self.masks is None:
            return torch.cat([self.net.logits(e, dense_hidden(self.net, e, t[None])).float() for t in tokens])
        full = torch.zeros(BATCH, CONTEXT, dtype=torch.long, device=DEVICE)
        full[:n] = tokens
        return self.net.logits(e, self.net.hidden(e, full, self.masks(full)))[:n].float()


def held_out(score, e, rows, answers, limit):
    loss = right = count = 0.0
    for i in range(0, min(len(rows), limit), BATCH):
        index = torch.arange(i, min(i + BATCH, len(rows), limit), device=DEVICE)
        ids, mask = rows.take(index)
        target = ids[:, 1:].long()
        keep = (target != 0) & (target != 2) & (mask[:, 1:] if answers else True)
        logits = score(e, ids[:, :-1].long())
        ce = torch.logsumexp(logits, -1) - logits.gather(-1, target[..., None])[..., 0]
        loss, count = loss + (ce * keep).sum().item(), count + keep.sum().item()
        right += ((logits.argmax(-1) == target) & keep).sum().item()
    return {"loss": round(loss / count, 4), "top1": round(right / count, 4), "tokens": int(count)}


@torch.no_grad()
def agreement(score_d, ed, score_t, et, texts):
    """texts: (prompt ids, answer ids) written by the target."""
    top1 = top4 = count = overlap = 0
    passes = {4: 0, 8: 0}
    for i in range(0, len(texts), BATCH):
        part = texts[i : i + BATCH]
        longest = CONTEXT if DEVICE == "cuda" else max(len(p) + len(o) for p, o in part)
        tokens = torch.zeros(len(part), longest, dtype=torch.long)
        for j, (p, o) in enumerate(part):
            tokens[j, : len(p) + len(o)] = torch.tensor(p + o)
        tokens = tokens.to(DEVICE)
        ld, lt = score_d(ed, tokens), score_t(et, tokens)
        for j, (p, o) in enumerate(part):
            at = slice(len(p) - 1, len(p) + len(o) - 1)
            answer, best = tokens[j, len(p) : len(p) + len(o)], ld[j, at].topk(4, -1).indices
            hit = best == answer[:, None]
            top1, top4, count = top1 + hit[:, 0].sum().item(), top4 + hit.any(1).sum().item(), count + len(o)
            overlap += torch.minimum(ld[j, at].softmax(-1), lt[j, at].softmax(-1)).sum().item()
            for k in passes:
                passes[k] += chain(hit[:, 0].tolist(), k)
    return {"top1": round(top1 / count, 3), "top4": round(top4 / count, 3), "overlap": round(overlap / count, 3),
            "tokens_per_pass_chain4": round(count / passes[4], 2), "tokens_per_pass_chain8": round(count / passes[8], 2),
            "tokens": count}


def prompts_of(rows, model_id):
    """First user turns (with the start of the answer) of the chats in packed rows."""
    for row in rows:
        bos = np.flatnonzero(row == pack.BOS)
        for s, e in zip(bos, list(bos[1:]) + [len(row)]):
            doc = row[s:e]
            ends = np.flatnonzero(doc == pack.EOT)
            if len(ends) and ends[0] + 4 < len(doc) and doc[ends[0] + 3] == model_id and ends[0] < 380:
                yield doc[: ends[0] + 5].tolist()


def prompts_by_kind(data, tok, limit):
    out = {}
    rows = np.load(os.path.join(data, "heldout-instruct.npy"))
    for p in prompts_of(rows, tok.token_to_id("model")):
        kind = "chat with code" if "```" in tok.decode(p) or "function" in tok.decode(p) else "chat"
        out.setdefault(kind, []).append(p)
    for kind in ("code", "docs", "prose"):
        rows = np.load(os.path.join(data, f"heldout-{kind}.npy"))
        out[kind + " continued"] = [r[:128].tolist() for r in rows if not (r[1:128] == 2).any() and r[127] != 0]
    return {k: v[:limit] for k, v in out.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--models", required=True)
    ap.add_argument("--questions", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--rows", type=int, default=192)
    ap.add_argument("--prompts", type=int, default=192)
    a = ap.parse_args()
    global DEVICE
    DEVICE = a.device
    nets, quant, plain, score = {}, {}, {}, {}
    for name in ("demo-target", "demo-draft"):
        path = os.path.join(a.models, name, "model.safetensors")
        if os.path.exists(path):
            w = {n: t.float().to(DEVICE) for n, t in load_file(path).items()}
            net = nets[name] = Net(name, DEVICE)
            with torch.no_grad():
                quant[name], plain[name] = net.effective(w, True), net.effective(w, False)
            score[name] = Scorer(net)
    tok = Tokenizer.from_file(os.path.join(a.models, "demo-target", "tokenizer.json"))
    report = {"held_out": {}, "agreement": {}, "samples": []}
    for name in nets:
        for kind in ("code", "docs", "prose", "instruct", "answers"):
            rows = Rows(a.data, "heldout-" + kind.replace("answers", "instruct"), DEVICE)
            for what, e in (("bf16", plain), ("4-bit", quant)):
                r = report["held_out"][f"{name} {kind} {what}"] = held_out(score[name], e[name], rows, kind == "answers", a.rows)
                print(name, kind, what, r, flush=True)
    net, e = nets["demo-target"], quant["demo-target"]
    questions = [q for q in open(a.questions, encoding="utf-8").read().split("\n") if q.strip()]
    chats = [tok.encode(f"<bos><start_of_turn>user\n{q}<end_of_turn>\n<start_of_turn>model\n", add_special_tokens=False).ids for q in questions]
    greedy, sampled = generate(net, e, chats, 200), generate(net, e, chats, 200, temperature=1.0, seed=11)
    for q, g, s in zip(questions, greedy, sampled):
        report["samples"].append({"question": q, "greedy": tok.decode(g), "sampled": tok.decode(s)})
    if "demo-draft" in nets:
        sets = {k: (v, 200) for k, v in prompts_by_kind(a.data, tok, a.prompts).items()} | {"simple questions": (chats, 200)}
        for kind, (prompts, new) in sets.items():
            for what, t in (("greedy", 0.0), ("T=1", 1.0)):
                texts = list(zip(prompts, generate(net, e, prompts, new, temperature=t, seed=5)))
                r = agreement(score["demo-draft"], quant["demo-draft"], score["demo-target"], e, texts)
                report["agreement"][f"{kind}, {what}"] = r
                print(kind, what, r, flush=True)
    os.makedirs(a.out, exist_ok=True)
    with open(os.path.join(a.out, "report.json"), "w", encoding="utf-8") as f:
        json.dump(report, f, indent=1, ensure_ascii=False)
    for s in report["samples"]:
        print(f"## {s['question']}\n-- greedy: {s['greedy']}\n-- sampled: {s['sampled']}\n")


if __name__ == "__main__":
    main()
