"""Packed rows in GPU memory and the mixes drawn from them; rows that the target wrote itself."""
import glob
import os

import numpy as np
import torch
from safetensors.torch import load_file

from slots import BOS, READ, SEEN, WRITTEN

ROW = 2049

# Shares of rows by class. STABLE: everything. DECAY: mostly chats, loss on the model's turns only.
# AGAIN: the same with more hand-written chats, talks of several turns, and more of everything that
# is no chat.
STABLE = {"code": 0.19, "docs": 0.22, "prose": 0.194, "chat-rest": 0.13, "chat-qa": 0.09,
          "chat-tpl": 0.02,
          "chat-define": 0.006, "chat-codeqa": 0.05, "chat-exercise": 0.02, "chat-math": 0.025,
          "chat-dialogue": 0.04, "chat-extract": 0.012, "chat-med": 0.003}
DECAY = {"code": 0.05, "docs": 0.08, "prose": 0.07, "chat-rest": 0.07, "chat-qa": 0.34,
         "chat-tpl": 0.06,
         "chat-define": 0.03, "chat-codeqa": 0.11, "chat-exercise": 0.04, "chat-math": 0.06,
         "chat-dialogue": 0.05, "chat-extract": 0.02, "chat-med": 0.008, "chat-seed": 0.045}
AGAIN = {"code": 0.095, "docs": 0.095, "prose": 0.105, "chat-rest": 0.04, "chat-qa": 0.17,
         "chat-tpl": 0.025,
         "chat-define": 0.008, "chat-codeqa": 0.07, "chat-exercise": 0.015, "chat-math": 0.025,
         "chat-dialogue": 0.025, "chat-extract": 0.01, "chat-med": 0.002, "chat-seed": 0.09,
         "chat-talk": 0.24}
MIXES = {"stable": STABLE, "decay": DECAY, "again": AGAIN}


def files_of(folder, name):
    """NAME.npy, or NAME.0.npy, NAME.1.npy, ... where several processes wrote a class."""
    whole = os.path.join(folder, name + ".npy")
    return [whole] if os.path.exists(whole) else sorted(
        glob.glob(os.path.join(folder, name + ".[0-9].npy"))
    )


class Rows:
    """All rows of one class, on the device."""

    def __init__(self, folder, name, device="cuda"):
        files = files_of(folder, name)
        self.ids = torch.from_numpy(np.concatenate([np.load(f) for f in files])).to(device)
        self.bits = torch.from_numpy(
            np.concatenate([np.load(f[:-4] + ".mask.npy") for f in files])
        ).to(device)
        self.shift = torch.arange(7, -1, -1, device=device, dtype=torch.uint8)

    def __len__(self):
        return len(self.ids)

    def take(self, index):
        ids = self.ids[index].int()
        mask = ((self.bits[index][:, :, None] >> self.shift) & 1).flatten(1)[:, :ROW].bool()
        return ids, mask


class Mix:
    """Draws batches of rows: the class of each row at random by share, rows of a class in shuffled
    epochs."""

    def __init__(self, folder, shares, batch, seed, answers_only, device="cuda"):
        names = [n for n in shares if files_of(folder, n)]
        total = sum(shares[n] for n in names)
        self.names, self.p = names, np.array([shares[n] / total for n in names])
        self.sets = {n: Rows(folder, n, device) for n in names}
        self.rng, self.batch, self.answers_only = np.random.default_rng(seed), batch, answers_only
        self.order, self.seen, self.device = {
            n: np.zeros(0, np.int64) for n in names
        }, dict.fromkeys(names, 0), device

    def _indices(self, name, n):
        self.seen[name] += n
        while len(self.order[name]) < n:
            self.order[name] = np.concatenate(
                [self.order[name], self.rng.permutation(len(self.sets[name]))]
            )
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
            chat = name.startswith("chat")
            weight.append(m if self.answers_only and chat else torch.ones_like(m))
        ids, weight = torch.cat(ids), torch.cat(weight)
        target = ids[:, 1:].long()
        return ids[:, :-1].long(), target, (weight[:, 1:] & (target != 0) & (target != 2)).float()

    def epochs(self):
        return {n: round(float(self.seen[n]) / len(self.sets[n]), 2) for n in self.names}


class Own:
    """The rows of own.py, on the device, in shuffled epochs; `read`: the weight of a prompt's
    tokens beside the target's own."""

    def __init__(self, folder, read, seed, device="cuda"):
        parts = [load_file(f) for f in sorted(glob.glob(os.path.join(folder, "own.*.safetensors")))]
        whole = {n: torch.cat([p[n].to(device) for p in parts]) for n in parts[0]}
        self.tokens, self.kind = whole["tokens"], whole["kind"]
        self.top, self.chance = whole["top"], whole["chance"]
        # Tokens before a row's first <bos> continue the previous row, which the draft does not
        # see.
        self.kind[(self.tokens == BOS).cumsum(1) == 0] = SEEN
        self.weight = torch.zeros(3, device=device)
        self.weight[READ], self.weight[WRITTEN] = read, 1.0
        self.rng, self.order, self.seen = np.random.default_rng(seed), np.zeros(0, np.int64), 0

    def __len__(self):
        return len(self.tokens)

    def next(self, rows):
        """tokens [rows, 2048], the likeliest next ones and the logarithms of their probabilities,
        loss weights."""
        while len(self.order) < rows:
            self.order = np.concatenate([self.order, self.rng.permutation(len(self))])
        index = torch.from_numpy(self.order[:rows]).to(self.tokens.device)
        self.order, self.seen = self.order[rows:], self.seen + rows
        weight = self.weight[self.kind[index].long()]
        return self.tokens[index].long(), self.top[index].long(), self.chance[index].float(), weight

    def epochs(self):
        return self.seen / len(self)
