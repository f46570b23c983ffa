"""Packed rows in GPU memory and the mixes drawn from them."""
import glob
import os

import numpy as np
import torch

ROW = 2049

# Shares of rows by class. STABLE: everything. DECAY: mostly chats, loss on the model's turns only.
STABLE = {"code": 0.19, "docs": 0.22, "prose": 0.194, "chat-rest": 0.13, "chat-qa": 0.09, "chat-tpl": 0.02,
          "chat-define": 0.006, "chat-codeqa": 0.05, "chat-exercise": 0.02, "chat-math": 0.025,
          "chat-dialogue": 0.04, "chat-extract": 0.012, "chat-med": 0.003}
DECAY = {"code": 0.05, "docs": 0.08, "prose": 0.07, "chat-rest": 0.07, "chat-qa": 0.34, "chat-tpl": 0.06,
         "chat-define": 0.03, "chat-codeqa": 0.11, "chat-exercise": 0.04, "chat-math": 0.06,
         "chat-dialogue": 0.05, "chat-extract": 0.02, "chat-med": 0.008, "chat-seed": 0.045}
DISTIL = {"code": 0.10, "docs": 0.05, "prose": 0.05, "chat-rest": 0.04, "chat-qa": 0.14, "chat-tpl": 0.04,
          "chat-define": 0.02, "chat-codeqa": 0.08, "chat-exercise": 0.04, "chat-math": 0.04,
          "chat-dialogue": 0.03, "chat-extract": 0.02, "chat-med": 0.01, "chat-seed": 0.02, "own": 0.32}
MIXES = {"stable": STABLE, "decay": DECAY, "distil": DISTIL}


def files_of(folder, name):
    """NAME.npy, or NAME.0.npy, NAME.1.npy, ... where several processes wrote a class."""
    whole = os.path.join(folder, name + ".npy")
    return [whole] if os.path.exists(whole) else sorted(glob.glob(os.path.join(folder, name + ".[0-9].npy")))


class Rows:
    """All rows of one class, on the device."""

    def __init__(self, folder, name, device="cuda"):
        files = files_of(folder, name)
        self.ids = torch.from_numpy(np.concatenate([np.load(f) for f in files])).to(device)
        self.bits = torch.from_numpy(np.concatenate([np.load(f[:-4] + ".mask.npy") for f in files])).to(device)
        self.shift = torch.arange(7, -1, -1, device=device, dtype=torch.uint8)

    def __len__(self):
        return len(self.ids)

    def take(self, index):
        ids = self.ids[index].int()
        mask = ((self.bits[index][:, :, None] >> self.shift) & 1).flatten(1)[:, :ROW].bool()
        return ids, mask


class Mix:
    """Draws batches of rows: the class of each row at random by share, rows of a class in shuffled epochs."""

    def __init__(self, folder, shares, batch, seed, answers_only, device="cuda"):
        names = [n for n in shares if files_of(folder, n)]
        total = sum(shares[n] for n in names)
        self.names, self.p = names, np.array([shares[n] / total for n in names])
        self.sets = {n: Rows(folder, n, device) for n in names}
        self.rng, self.batch, self.answers_only = np.random.default_rng(seed), batch, answers_only
        self.order, self.seen, self.device = {n: np.zeros(0, np.int64) for n in names}, dict.fromkeys(names, 0), device

    def _indices(self, name, n):
        self.seen[name] += n
        while len(self.order[name]) < n:
            self.order[name] = np.concatenate([self.order[name], self.rng.permutation(len(self.sets[name]))])
        out, self.order[name] = self.order[name][:n], self.order[name][n:]
        return torch.from_numpy(out).to(self.device)

    def next(self):
        """tokens, targets [batch, 2048] int64 and loss weights [batch, 2048] f32."""
        ids, weight = [], []
        for name, n in zip(self.names, self.rng.multinomial(self.batch, self.p)):
            if n == 0:
                continue
            t, m = self.sets[name].take(self._indices(name, n))
            ids.append(t)
            chat = name.startswith("chat") or name == "own"
            weight.append(m if self.answers_only and chat else torch.ones_like(m))
        ids, weight = torch.cat(ids), torch.cat(weight)
        target = ids[:, 1:].long()
        return ids[:, :-1].long(), target, (weight[:, 1:] & (target != 0) & (target != 2)).float()

    def epochs(self):
        return {n: round(float(self.seen[n]) / len(self.sets[n]), 2) for n in self.names}
