"""Trains the 16,384-piece BPE tokenizer and writes tokenizer.json.

    python train_tokenizer.py --corpus CORPUS --out DIR [--mb 100]

The file has the form of Gemma's: BPE with byte fallback over the whole text, spaces as U+2581,
no dummy prefix. Pieces are learned inside words (optional space + letters, or optional space +
punctuation; digits single), so no piece crosses such a border and the finished tokenizer needs no
pre-tokenizer. Runs of spaces, newlines and tabs get merges that precede all others.
"""
import argparse
import json
import os
import random

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from corpus import documents, shards

VOCAB = 16384
SPECIAL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 105: "<start_of_turn>", 106: "<end_of_turn>"
}
FIRST_BYTE = 107
SP = "\u2581"
WORDS = rf"{SP}?[\p{{L}}\p{{M}}]+|{SP}?[^\s\p{{L}}\p{{M}}\p{{N}}{SP}]+|\p{{N}}|{SP}+|\n+|\t+|\s"
RUNS = ((SP, 32), ("\n", 12), ("\t", 8))
SHARE = {"code": 0.27, "docs": 0.2, "instruct": 0.36, "prose": 0.17}


def sample(corpus, megabytes, seed):
    """A balanced random sample of documents (each cut at 20,000 characters)."""
    rng = random.Random(seed)
    for kind, share in SHARE.items():
        paths = shards(corpus, "train", kind)
        sizes = {p: os.path.getsize(p) for p in paths}
        for p in paths:
            want = share * megabytes * 1e6 * sizes[p] / sum(sizes.values())
            docs = documents(p)
            rng.shuffle(docs)
            for d in docs:
                if want <= 0:
                    break
                want -= len(d[:20000])
                yield d[:20000]


def run_merges():
    """Merges that turn any run of up to n equal characters into one piece."""
    merges = []
    for ch, longest in RUNS:
        powers = [2**k for k in range(1, 6) if 2**k <= longest]
        merges += [(ch * (p // 2), ch * (p // 2)) for p in powers]
        for n in range(3, longest + 1):
            if n not in powers:
                head = max(p for p in powers if p < n)
                merges.append((ch * head, ch * (n - head)))
    return merges


def learn(texts, size):
    tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tok.normalizer = normalizers.Replace(" ", SP)
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    ascii_chars = [chr(c) for c in range(33, 127)] + [SP, "\n", "\t"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=3, show_progress=False, limit_alphabet=400,
        initial_alphabet=ascii_chars, max_token_length=16,
    )
    tok.train_from_iterator(texts, trainer)
    model = json.loads(tok.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    return model["vocab"], merges


def build(texts):
    runs = run_merges()
    run_pieces = [a + b for a, b in runs]
    # The learned vocabulary may hold run pieces too: ask for more than is needed, then cut.
    vocab, merges = learn(texts, VOCAB + 100)
    chars = sorted((c for c in vocab if len(c) == 1), key=lambda c: vocab[c])
    ids = dict((piece, i) for i, piece in SPECIAL.items())
    free = [i for i in range(4, 105)]
    for piece in run_pieces:
        ids[piece] = free.pop(0)
    for n, i in enumerate(free):
        ids[f"<unused{n}>"] = i
    for b in range(256):
        ids[f"<0x{b:02X}>"] = FIRST_BYTE + b
    for c in chars:
        ids[c] = len(ids)
    kept = list(runs)
    for a, b in merges:
        piece = a + b
        if piece in run_pieces or set(
            piece
        ) <= {SP} or set(piece) <= {"\n"} or set(piece) <= {"\t"}:
            continue
        if len(ids) == VOCAB:
            break
        if a in ids and b in ids:
            kept.append((a, b))
            ids.setdefault(piece, len(ids))
    assert len(ids) == VOCAB and sorted(ids.values()) == list(range(VOCAB))
    added = [
        {"id": i, "content": p, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, p in sorted(SPECIAL.items())
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SP},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "},
                          "behavior": "MergedWithPrevious",
                          "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"SpecialToken": {"id": "<bos>", "type_id": 0}},
                     {"Sequence": {"id": "A", "type_id": 0}},
                     {"SpecialToken": {"id": "<bos>", "type_id": 1}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SP}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>",
                  "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
                  "ignore_merges": False, "vocab": dict(sorted(ids.items(), key=lambda kv: kv[1])),
                  "merges": [list(m) for m in kept]},
    }


def check(path, texts):
    """Every text must come back exactly (U+2581 itself excepted: it decodes to a space)."""
    tok = Tokenizer.from_file(path)
    odd = ["", " ", "  x", "a  b\n\n\n\tc\r\n", "\n" * 70 + " " * 100 + "\t" * 20,
           "caf\u00e9 \u6f22\u5b57 \U0001f600\u200d\U0001f680 \x00\x7f",
           "def f(x):\n    return {\n        'a': 1234,\n\t}\n", "<0x41> <b> 'don't' x<=y"]
    n_bytes = n_ids = 0
    for t in odd + texts:
        enc = tok.encode(t, add_special_tokens=False).ids
        back = tok.decode(enc, skip_special_tokens=False)
        assert back == t or SP in t or any(s in t for s in SPECIAL.values()), (t[:200], back[:200])
        n_bytes, n_ids = n_bytes + len(t.encode()), n_ids + len(enc)
    print(f"round trip of {len(odd) + len(texts)} texts: exact; {n_bytes / max(1, n_ids):.3f} "
          f"bytes per token")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--mb", type=float, default=100)
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    path = os.path.join(a.out, "tokenizer.json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump(build(sample(a.corpus, a.mb, a.seed)), f, ensure_ascii=False, indent=1)
    for p in shards(a.corpus, "heldout"):
        print(os.path.basename(p), end=" ")
        check(path, documents(p)[:150])


if __name__ == "__main__":
    main()
