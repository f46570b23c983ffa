"""Makes the text that gemma4_pair.py trains on, and prompts to measure the pair with.

    python gemma4_pair_data.py --corpus CORPUS --tokenizer tokenizer.json --out pair.xz \\
        --prompts prompts.jsonl

CORPUS is a folder as corpus.py describes it. pair.xz holds two arrays of uint16 ids, the training
text and the held-out text. A document starts with <bos>. Half of the documents that are no chats
become chats: the user's turn is the head of the document, the model's turn is the rest. The
prompts are heads of held-out documents, or the first questions of held-out chats."""
import argparse
import json
import lzma
import random

import numpy as np
from tokenizers import Tokenizer

from corpus import KINDS, documents, shards

LONGEST = 6000  # characters of a document
USER, MODEL, END = "<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n"
# The 16-bit steps of the ids in LZMA's terms.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]


def split(text, rng):
    """Returns a document's head of 200 to 400 characters, cut at a word, and the rest."""
    at = text.find(" ", rng.randrange(200, 380))
    return (text[:at], text[at:]) if 0 < at < 400 else (text[:200], text[200:])


def written(text, rng):
    """Returns a document as the text of a training example."""
    text = text.strip()[:LONGEST]
    if text.startswith(USER):
        return f"<bos>{text}\n"
    if rng.random() < 0.5 or len(text) < 500:
        return f"<bos>{text}\n<eos>"
    head, rest = split(text, rng)
    return f"<bos>{USER}{head.strip()}{END}{MODEL}{rest.strip()}{END}"


def shuffled(corpus, part, kind, rng):
    found = [d for path in shards(corpus, part, kind) for d in documents(path)]
    rng.shuffle(found)
    return found


def encoded(tokenizer, texts, most):
    """Returns the ids of the first texts, about `most` ids in all."""
    out, total = [], 0
    for i in range(0, len(texts), 500):
        for e in tokenizer.encode_batch(texts[i : i + 500], add_special_tokens=False):
            out.append(np.array(e.ids, np.uint16))
            total += len(e.ids)
        if total >= most:
            break
    return out


def prompt_of(kind, i, text, rng):
    if text.startswith(USER):
        ask, answer = text[len(USER) :].split(END, 1)
        head, rest = ask[:400], answer.removeprefix(MODEL)
    else:
        head, rest = split(text, rng)
    return {"id": f"{kind}/{i}", "category": kind, "prompt": head.strip(), "text": rest[:1000]}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--prompts", required=True)
    ap.add_argument("--tokens", type=float, default=8.4e6, help="training ids of each kind of text")
    ap.add_argument("--count", type=int, default=15, help="prompts of each kind of text")
    a = ap.parse_args()
    tokenizer, rng = Tokenizer.from_file(a.tokenizer), random.Random(7)
    train, held, prompts = [], [], []
    for kind in KINDS:
        found = [d.strip() for d in shuffled(a.corpus, "heldout", kind, rng)]
        long = [d for d in found if len(d) >= 600 or d.startswith(USER)][: a.count]
        prompts += [prompt_of(kind, i, d, rng) for i, d in enumerate(long)]
        held += encoded(tokenizer, [written(d, rng) for d in found], 50_000)
        texts = [written(d, rng) for d in shuffled(a.corpus, "train", kind, rng)]
        ids = encoded(tokenizer, texts, a.tokens)
        print(kind, len(ids), "documents,", sum(map(len, ids)), "ids", flush=True)
        train += ids
    rng.shuffle(train)
    rng.shuffle(held)
    with lzma.open(a.out, "wb", filters=FILTERS) as f:
        np.save(f, np.concatenate(train))
        np.save(f, np.concatenate(held))
    with open(a.prompts, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts)


if __name__ == "__main__":
    main()
