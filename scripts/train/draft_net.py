"""gemma3-draft in PyTorch: the layers of model.py at any shape, all with a sliding window, on a
reduced vocabulary."""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from hf_files import HEAD_DIM
from model import (PARTS, StraightThrough, Turn, layer, packed_layer, quantise_act, quantise_i4,
                   rms_norm, rope_tables)


@dataclass(frozen=True)
class Shape:
    dim: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int = 2
    vocab: int = 32768
    window: int = 512

    def shapes(self):
        """Tensor name -> shape, in the order of the file."""
        d, f, q, kv = self.dim, self.ffn, self.heads * HEAD_DIM, self.kv_heads * HEAD_DIM
        of = {"input_layernorm": (d,), "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d),
              "self_attn.v_proj": (kv, d),
              "self_attn.o_proj": (d, q), "self_attn.q_norm": (
                  HEAD_DIM,
              ), "self_attn.k_norm": (HEAD_DIM,),
              "post_attention_layernorm": (
                  d,
              ), "pre_feedforward_layernorm": (d,), "mlp.gate_proj": (f, d),
              "mlp.up_proj": (f, d), "mlp.down_proj": (d, f), "post_feedforward_layernorm": (d,)}
        out = {"model.embed_tokens.weight": (self.vocab, d)}
        for i in range(self.layers):
            out |= {f"model.layers.{i}.{n}.weight": s for n, s in of.items()}
        return out | {"model.norm.weight": (d,)}

    def parameters(self):
        return sum(math.prod(s) for s in self.shapes().values())


# Shapes by name; the ablations vary `small`.
SHAPES = {
    "small": Shape(dim=384, layers=5, ffn=1024, heads=6),
    "medium": Shape(dim=640, layers=8, ffn=1792, heads=8),
    "deep": Shape(dim=256, layers=12, ffn=768, heads=4),
    "wide": Shape(dim=512, layers=2, ffn=1024, heads=8),
    "tiny": Shape(dim=128, layers=2, ffn=128, heads=2),
}


class DraftNet:
    def __init__(self, shape: Shape, device="cuda", length=1024):
        self.shape, self.device = shape, device
        self.turn = Turn(device=device)
        self.cos, self.sin = rope_tables(1e4, length, device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def init(self, seed):
        """Random f32 weights; the norms after each block start small so that the residual stays
        tame."""
        g, w = torch.Generator().manual_seed(seed), {}
        for n, s in self.shape.shapes().items():
            if len(s) == 2:
                t = torch.randn(s, generator=g) * (0.02 if "embed" in n else s[1] ** -0.5 * 0.7)
            else:
                t = torch.full(s, -0.7 if "post_" in n else 0.0)
            w[n] = t.to(self.device).requires_grad_()
        return w

    def effective(self, w, quant):
        """Weights as the forward pass uses them; with `quant` rounded as the quantiser will
        (straight-through gradients).

        `hidden` and `logits` then want the same `quant`: inputs of linears rounded to 8 bits as the
        program does."""
        out = {}
        for n, t in w.items():
            if t.dim() == 1:
                out[n] = StraightThrough.apply(t, lambda x: x.bfloat16().float()) if quant else t
            else:
                out[n] = (
                    StraightThrough.apply(t, lambda x: quantise_i4(x, self.turn)) if quant else t
                ).to(self.dtype)
        return out

    def hidden(self, e, tokens, mask, quant=False):
        turn = self.turn if quant else None
        x, n = F.embedding(
            tokens, e["model.embed_tokens.weight"]
        ).float() * math.sqrt(self.shape.dim), tokens.shape[1]
        for i in range(self.shape.layers):
            w = [e[f"model.layers.{i}.{p}.weight"] for p in PARTS]
            if self.device == "cuda":
                x = packed_layer(x, w, self.cos[:n], self.sin[:n], mask, turn)
            else:
                attend = lambda q, k, v: F.scaled_dot_product_attention(
                    q, k, v, mask, scale=HEAD_DIM**-0.5, enable_gqa=True
                )
                x = layer(x, w, self.cos[:n], self.sin[:n], attend, turn)
        return x

    def logits(self, e, x, quant=False):
        y = rms_norm(x, e["model.norm.weight"]).to(self.dtype)
        return F.linear(quantise_act(y, self.turn) if quant else y, e["model.embed_tokens.weight"])


class Mask:
    """Causal, inside one document, within the window. The document numbers live in one buffer, so
    that nothing is recompiled."""

    def __init__(self, shape, batch, length, bos_row, device="cuda"):
        self.doc = torch.zeros(batch, length, dtype=torch.int32, device=device)
        self.bos, self.window, self.device = bos_row, shape.window, device
        doc, window = self.doc, shape.window

        def seen(b, h, q, k):
            return (q >= k) & (q - k < window) & (doc[b, q] == doc[b, k])

        self.seen, self.make = seen, torch.compile(create_block_mask)

    def __call__(self, tokens):
        self.doc.copy_((tokens == self.bos).cumsum(1))
        b, n = self.doc.shape
        if self.device == "cuda":
            return self.make(self.seen, b, None, n, n, device="cuda")
        pos = torch.arange(n)
        near = (pos[:, None] >= pos) & (pos[:, None] - pos < self.window)
        return (near & (self.doc[:, :, None] == self.doc[:, None]))[:, None]
