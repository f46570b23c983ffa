"""Turns a checkpoint of draft_train.py so that the signs in front of the program's Hadamard transforms change nothing.

    python draft_turn.py RUN/small.pt TURNED/small.pt

The drafts in the project were trained before model.py knew of the signs: rounded behind the transform alone. What they learnt is kept
by another model, the same function of its tokens: channels of the residual stream and of the feed-forward layer change their signs,
with the columns that read them and the rows that write them, which makes the codes of all matrices those of training. One is left,
the output of attention: its columns belong to heads that share keys and values and cannot change theirs one by one, so it is
stored here as it was rounded in training, to be rounded again. Where a row changes its sign, weights at the end of -8..7 move by one.
"""
import sys

import torch

from draft_net import Shape
from model import I4_STEP, hadamard, signs


def rounded(w, h):
    """As training without signs rounded it."""
    wh = (w.float().unflatten(1, (-1, 128)) @ h).flatten(1)
    s = (I4_STEP * wh.square().mean(1, keepdim=True).sqrt()).half().float().clamp_min(6e-8)
    return ((torch.clamp(torch.round(wh / s), -8, 7) * s).unflatten(1, (-1, 128)) @ h).flatten(1)


def turned(w, shape):
    d, f, h = signs(shape.dim, "cpu"), signs(shape.ffn, "cpu"), hadamard(device="cpu")
    out = w | {"model.embed_tokens.weight": w["model.embed_tokens.weight"] * d}
    for i in range(shape.layers):
        name = lambda part: f"model.layers.{i}.{part}.weight"
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
            out[name(part)] = w[name(part)] * d
        out[name("mlp.up_proj")] = w[name("mlp.up_proj")] * d * f[:, None]
        out[name("mlp.down_proj")] = w[name("mlp.down_proj")] * f * d[:, None]
        out[name("self_attn.o_proj")] = rounded(w[name("self_attn.o_proj")], h) * d[:, None]
    return out


state = torch.load(sys.argv[1], map_location="cpu")
state["weights"] = turned(state["weights"], Shape(**state["shape"]))
torch.save(state, sys.argv[2])
