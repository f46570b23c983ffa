"""The reduced vocabulary of gemma3-draft: which ids of Gemma 3's tokenizer are its rows, and what
stands for the others.

    python draft_vocab.py --tokenizer tokenizer.json --freq token_freq.npz --size 32768 --out
    draft_vocabulary.json

token_freq.npz counts each id by kind of text (arrays train_KIND). Ids are ranked by their share of
a mix of kinds (SHARE), so that no kind of task is left with many unknown words. Control tokens of
the chat format and all 256 byte tokens are always in.

An id outside the vocabulary is read as the pieces that its text splits into, longest first, all of
them in the vocabulary; of more than MOST pieces the last ones count. It is never predicted.
`src/engine/reduced.rs` does the same."""
import argparse
import hashlib
import json

import numpy as np

SHARE = {"instruct": 0.45, "code": 0.25, "docs": 0.2, "prose": 0.1}
CONTROL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 105: "<start_of_turn>", 106: "<end_of_turn>"
}
# ids of TEXT are pieces of text in every Gemma 3 model; the rest may be renamed
FIRST_BYTE, TEXT = 238, (107, 255999)
MOST = 4


def piece_bytes(piece):
    """The text that a piece adds."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


def pieces_of(tokenizer_json):
    """Bytes of every id (empty where there is none)."""
    with open(tokenizer_json, encoding="utf-8") as f:
        t = json.load(f)
    ids = dict((i, p) for p, i in t["model"]["vocab"].items()) | {
        a["id"]: a["content"] for a in t["added_tokens"]
    }
    return [piece_bytes(ids.get(i, "")) for i in range(max(ids) + 1)]


def fingerprint(pieces):
    """SHA-256 over length and bytes of each piece of TEXT."""
    h = hashlib.sha256()
    for p in pieces[TEXT[0] : TEXT[1]]:
        h.update(len(p).to_bytes(4, "little") + p)
    return h.hexdigest()


def rank(freq, size):
    score = sum(
        share * freq["train_" + kind] / freq["train_" + kind].sum() for kind, share in SHARE.items()
    )
    always = np.array(sorted(CONTROL) + list(range(FIRST_BYTE, FIRST_BYTE + 256)))
    score[: TEXT[0]] = score[TEXT[1] :] = 0
    score[always] = 10
    best = np.lexsort((np.arange(len(score)), -score))[:size]
    return np.sort(best)


class Vocabulary:
    """Maps between ids of the tokenizer and rows of the model."""

    def __init__(self, path, pieces=None):
        with open(path, encoding="utf-8") as f:
            v = json.load(f)
        self.ids = np.cumsum(v["steps"]).astype(np.int32)
        self.row = np.full(262145, -1, np.int32)
        self.row[self.ids] = np.arange(len(self.ids))
        self.fingerprint = v["tokenizer"]["sha256"]
        if pieces is not None:
            assert fingerprint(pieces) == self.fingerprint, "another tokenizer"
            self.parts = self._parts(pieces)

    def __len__(self):
        return len(self.ids)

    def _parts(self, pieces):
        """Rows that stand for each id: int32 [262145, MOST], -1 where there are fewer."""
        known = {pieces[i]: self.row[i] for i in self.ids[::-1].tolist() if TEXT[0] <= i < TEXT[1]}
        longest = max(map(len, known))
        out = np.full((len(self.row), MOST), -1, np.int32)
        for i, row in enumerate(self.row.tolist()):
            if row >= 0:
                out[i, 0] = row
                continue
            text, rows, at = pieces[i] if i < len(pieces) else b"", [], 0
            while at < len(text):
                n = next(
                    n
                    for n in range(min(longest, len(text) - at), 0, -1)
                    if text[at : at + n] in known
                )
                rows.append(known[text[at : at + n]])
                at += n
            rows = rows[-MOST:] or [self.row[3]]
            out[i, : len(rows)] = rows
        return out

    def expand(self, ids, *flags):
        """Ids -> rows, whether each row is an id itself (not a part of one), and flags repeated
        alike."""
        parts = self.parts[ids]
        keep = parts >= 0
        known = np.repeat(self.row[ids] >= 0, keep.sum(1))
        return (parts[keep], known, *(np.repeat(f, keep.sum(1)) for f in flags))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--freq", required=True)
    ap.add_argument("--size", type=int, default=32768)
    ap.add_argument("--out", required=True)
    a = ap.parse_args()
    pieces, freq = pieces_of(a.tokenizer), dict(np.load(a.freq))
    ids = rank({k: v.astype(np.float64) for k, v in freq.items()}, a.size)
    steps = np.diff(ids, prepend=0).tolist()
    with open(a.out, "w", encoding="utf-8") as f:
        json.dump({"tokenizer": {"first": TEXT[0], "end": TEXT[1], "sha256": fingerprint(pieces),
                                 "control": {p: i for i, p in CONTROL.items()}},
                   "parts": MOST, "steps": steps}, f, separators=(",", ":"))
        f.write("\n")
    for k, v in freq.items():
        print(f"{k}: {v[ids].sum() / v.sum():.4f} of {v.sum() / 1e6:.1f} M tokens are in the "
              f"vocabulary")


if __name__ == "__main__":
    main()
