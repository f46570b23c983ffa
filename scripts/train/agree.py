"""How often drafts guess the first choice of the target, along texts that the target wrote greedily
to prompts that no training saw.

    python agree.py texts --target demo-target/model.safetensors --tokenizer tokenizer.json \\
        --out texts.json PROMPTS.jsonl ...
    python agree.py drafts --texts texts.json DRAFT.safetensors ...

`texts` takes --count prompts of each file, evenly, and lets the fake-quantised target write --new
tokens to each (first turns, lines with "turns" and "category"). `drafts` prints, for each exported
draft, fake-quantised, and each category: the share of tokens guessed, the share that is among four
guesses, and the tokens a pass of the target would bring where 4 or 8 tokens in a row are guessed.
A draft reads the last 256 tokens of a prompt, as in the program.
"""

import argparse
import json

import torch

import ddp
from generate import dense_hidden, effective, generate
from model import Net
from own import weights

READS = 256


def texts(a, device):
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(a.tokenizer)
    chosen = []
    for path in a.files:
        lines = [json.loads(l) for l in open(path, encoding="utf-8")]
        for l in lines[:: max(1, len(lines) // a.count)][: a.count]:
            ids = tok.encode(
                f"<bos><start_of_turn>user\n{l['turns'][0].strip()}<end_of_turn>\n"
                "<start_of_turn>model\n",
                add_special_tokens=False,
            ).ids
            if len(ids) + a.new < 1500:
                chosen.append((f"{l['dataset']} {l['category']}", ids))
    net = Net("demo-target", device)
    e = effective(net, weights(a.target, device))
    chosen.sort(key=lambda c: len(c[1]))
    out = []
    for i in range(0, len(chosen), 16):
        part = chosen[i : i + 16]
        for (kind, ids), answer in zip(part, generate(net, e, [ids for _, ids in part], a.new)):
            out.append({"kind": kind, "prompt": ids, "answer": answer})
        print(len(out), "of", len(chosen), flush=True)
    with open(a.out, "w", encoding="utf-8") as f:
        json.dump(out, f, separators=(",", ":"))


def chain(hits, most):
    """Passes of the target over a text, where `most` tokens in a row are guessed each time; hits:
    whether each token was guessed right."""
    n = at = 0
    while at < len(hits):
        run = 0
        while run < most and at + run < len(hits) and hits[at + run]:
            run += 1
        n, at = n + 1, at + run + 1
    return n


@torch.no_grad()
def hits_of(net, e, part, device):
    """For each text, for each token of the answer: whether it is the first guess, and whether
    among the first four."""
    rows = [(t["prompt"][-READS:], t["answer"]) for t in part]
    tokens = torch.zeros(len(rows), max(len(p) + len(o) for p, o in rows), dtype=torch.long)
    for i, (p, o) in enumerate(rows):
        tokens[i, : len(p) + len(o)] = torch.tensor(p + o)
    tokens = tokens.to(device)
    best = net.logits(e, dense_hidden(net, e, tokens)).float().topk(4, -1).indices
    for i, (p, o) in enumerate(rows):
        same = (
            best[i, len(p) - 1 : len(p) + len(o) - 1] == tokens[i, len(p) : len(p) + len(o), None]
        )
        yield same[:, 0].tolist(), same.any(1).sum().item()


def drafts(a, device):
    all_texts = json.load(open(a.texts, encoding="utf-8"))
    net = Net("demo-draft", device)
    for path in a.files:
        e, by = effective(net, weights(path, device)), {}
        for i in range(0, len(all_texts), 16):
            part = all_texts[i : i + 16]
            for t, (first, four) in zip(part, hits_of(net, e, part, device)):
                for kind in (t["kind"], "all"):
                    sums = by.setdefault(kind, [0] * 5)
                    for j, n in enumerate(
                        (len(first), sum(first), four, chain(first, 4), chain(first, 8))
                    ):
                        sums[j] += n
        print(path)
        for kind, (n, one, four, p4, p8) in sorted(by.items()):
            print(
                f"  {kind:30} {n:6} tokens, guessed {one / n:.3f}, among four {four / n:.3f}, "
                f"tokens a pass {n / p4:.2f} (4), {n / p8:.2f} (8)",
                flush=True,
            )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("what", choices=("texts", "drafts"))
    ap.add_argument("files", nargs="+")
    ap.add_argument("--target")
    ap.add_argument("--tokenizer")
    ap.add_argument("--texts")
    ap.add_argument("--out")
    ap.add_argument("--count", type=int, default=60)
    ap.add_argument("--new", type=int, default=96)
    a = ap.parse_args()
    {"texts": texts, "drafts": drafts}[a.what](a, ddp.start())


if __name__ == "__main__":
    main()
