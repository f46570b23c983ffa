"""Token streams in device memory: random crops by share, each crop once an epoch; shards may arrive
while training runs."""
import glob
import os

import numpy as np
import torch

from draft_tokens import ANSWER, STREAMS

ROW, KNOWN, FIRST = (1 << 20) - 1, 1 << 21, 1 << 22
# Shares of crops by stream. STABLE: about as the corpus has them; DECAY: more of what people asked
# and answered.
STABLE = {"code": 0.27, "docs": 0.24, "prose": 0.14, "chat": 0.15, "derived": 0.20}
DECAY = {"code": 0.26, "docs": 0.20, "prose": 0.14, "chat": 0.21, "derived": 0.19}


def expand(vocabulary, parts, row, ids):
    """int32 ids with ANSWER -> rows with ANSWER, KNOWN (the row is the id) and FIRST (the first of
    the rows of an id)."""
    answer, ids = ids & ANSWER, (ids & ROW).long()
    out = parts[ids]
    keep = out >= 0
    out[:, 0] |= FIRST
    out |= answer[:, None] | torch.where(row[ids] >= 0, KNOWN, 0)[:, None].int()
    return out[keep]


class Feed:
    def __init__(self, folder, vocabulary, length, seed, split="train", device="cuda"):
        self.folder, self.length, self.split, self.device = folder, length, split, device
        self.parts = torch.from_numpy(vocabulary.parts).to(device)
        self.row, self.vocabulary = torch.from_numpy(vocabulary.row).to(device), vocabulary
        self.flat, self.order, self.seen = {}, {}, dict.fromkeys(STREAMS, 0)
        self.files, self.rng = set(), np.random.default_rng(seed)
        self.steps = torch.arange(length + 1, device=device)

    def refresh(self):
        """Takes in shards that are new in the folder; returns how many tokens there are."""
        for path in sorted(glob.glob(os.path.join(self.folder, f"{self.split}.*.npy"))):
            if path in self.files or path.endswith(".tmp.npy"):
                continue
            self.files.add(path)
            ids = torch.from_numpy(np.load(path)).to(self.device)
            rows = torch.cat(
                [expand(self.vocabulary, self.parts, self.row, c) for c in ids.split(1 << 24)]
            )
            s = os.path.basename(path).split(".")[1]
            before = len(self.flat.get(s, ()))
            self.flat[s] = torch.cat([self.flat[s], rows]) if before else rows
            fresh = self._starts(s, before)
            self.order[s] = self.rng.permutation(
                np.concatenate([self.order.get(s, fresh[:0]), fresh])
            )
        return sum(map(len, self.flat.values()))

    def _starts(self, s, begin):
        return np.arange(
            begin + self.rng.integers(self.length), len(self.flat[s]) - self.length - 1, self.length
        )

    def batch(self, n, shares):
        """int32 [n, length + 1] on the device."""
        names = [s for s in STREAMS if s in self.flat]
        p = np.array([shares[s] for s in names])
        out = []
        for s, k in zip(names, self.rng.multinomial(n, p / p.sum())):
            while len(self.order[s]) < k:
                self.order[s] = np.concatenate(
                    [self.order[s], self.rng.permutation(self._starts(s, 0))]
                )
            at, self.order[s] = self.order[s][:k], self.order[s][k:]
            self.seen[s] += k * self.length
            out.append(self.flat[s][torch.from_numpy(at).to(self.device)[:, None] + self.steps])
        return torch.cat(out)

    def epochs(self):
        return {s: round(self.seen[s] / max(1, len(f)), 2) for s, f in self.flat.items()}

    def rows(self, s):
        """The whole stream in rows that overlap by one: int32 [rows, length + 1]."""
        n = (len(self.flat[s]) - 1) // self.length
        return self.flat[s][torch.arange(n, device=self.device)[:, None] * self.length + self.steps]
