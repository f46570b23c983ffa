"""Gemma 3 (text) in PyTorch, as trained here: exact semantics, 4-bit fake quantisation, flex attention.

Weights live in one flat dict of f32 tensors under their Hugging Face names. `effective` turns them
into what the quantiser will store (straight-through gradients); `Net.hidden` runs the stack on those.
"""
import math

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from hf_files import CONTEXT, HEAD_DIM, MODELS, VOCAB, WINDOW, shapes

EPS = 1e-6
I4_STEP = 0.3352  # step of the 4-bit grid in units of a row's root mean square
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def hadamard(n=128, device="cuda"):
    """Sylvester's matrix scaled to be orthonormal: H[i][j] = (-1)^popcount(i & j) / sqrt(n)."""
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / math.sqrt(n)


def quantise_i4(w, h):
    """4 bits per weight, one f16 scale per row, behind a Hadamard transform of each 128 columns."""
    rows, cols = w.shape
    wh = (w.view(rows, cols // 128, 128) @ h).view(rows, cols)
    s = (I4_STEP * wh.square().mean(1, keepdim=True).sqrt()).half().float().clamp_min(6e-8)
    q = torch.clamp(torch.round(wh / s), -8, 7)
    return ((q * s).view(rows, cols // 128, 128) @ h).view(rows, cols)


def quantise_i8(w):
    """8 bits per weight, one f16 scale per row."""
    s = (w.abs().amax(1, keepdim=True) / 127).half().float().clamp_min(6e-8)
    return torch.clamp(torch.round(w / s), -127, 127) * s


def straight_through(w, f):
    return w + (f(w) - w).detach()


def rms_norm(x, w):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1.0 + w)


def rope_tables(theta, length=CONTEXT, device="cuda"):
    inv = theta ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32, device=device) / HEAD_DIM)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), inv)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Net:
    def __init__(self, name, device="cuda"):
        m = MODELS[name]
        self.name, self.dim, self.layers = name, m["dim"], m["layers"]
        self.heads, self.kv_heads, self.pattern = m["heads"], m["kv_heads"], m["pattern"]
        self.embed_i4 = name == "demo-draft"
        self.h = hadamard(device=device)
        self.rope = {True: rope_tables(1e6, device=device), False: rope_tables(1e4, device=device)}

    def init(self, seed, device="cuda"):
        """Random f32 weights; the norms after each block start small so that the residual stays tame."""
        g = torch.Generator(device="cpu").manual_seed(seed)
        w = {}
        for n, s in shapes(self.name).items():
            if len(s) == 2:
                t = torch.randn(s, generator=g) * (0.02 if "embed" in n else s[1] ** -0.5 * 0.7)
            else:
                after = "post_attention" in n or "post_feedforward" in n
                t = torch.full(s, -0.7 if after else 0.0)
            w[n] = t.to(device).requires_grad_()
        return w

    def is_global(self, i):
        return (i + 1) % self.pattern == 0

    def effective(self, w, quant):
        """Weights as used by the forward pass: bf16 linears, fake-quantised when quant is set."""
        out = {}
        for n, t in w.items():
            if t.dim() == 1:
                out[n] = straight_through(t, lambda x: x.bfloat16().float()) if quant else t
                continue
            if quant:
                i4 = self.embed_i4 or "embed" not in n
                t = straight_through(t, (lambda x: quantise_i4(x, self.h)) if i4 else quantise_i8)
            out[n] = t.bfloat16()
        return out

    def attention_inputs(self, e, i, x, cos, sin):
        """Normed, rotated q, k and v of layer i: [batch, heads, length, 64]."""
        p, (b, s, _) = f"model.layers.{i}.self_attn.", x.shape
        split = lambda t, n: t.view(b, s, n, HEAD_DIM).transpose(1, 2)
        q = split(F.linear(x, e[p + "q_proj.weight"]), self.heads)
        k = split(F.linear(x, e[p + "k_proj.weight"]), self.kv_heads)
        v = split(F.linear(x, e[p + "v_proj.weight"]), self.kv_heads)
        q = rope(rms_norm(q, e[p + "q_norm.weight"]), cos, sin).bfloat16()
        k = rope(rms_norm(k, e[p + "k_norm.weight"]), cos, sin).bfloat16()
        return q, k, v

    def block(self, e, i, x, attend, cos, sin):
        """One layer; attend(i, q, k, v) -> [batch, heads, length, 64]."""
        p = f"model.layers.{i}."
        b, s, _ = x.shape
        y = rms_norm(x, e[p + "input_layernorm.weight"]).bfloat16()
        y = attend(i, *self.attention_inputs(e, i, y, cos, sin))
        y = F.linear(y.transpose(1, 2).reshape(b, s, -1), e[p + "self_attn.o_proj.weight"])
        x = x + rms_norm(y, e[p + "post_attention_layernorm.weight"])
        y = rms_norm(x, e[p + "pre_feedforward_layernorm.weight"]).bfloat16()
        gate = F.gelu(F.linear(y, e[p + "mlp.gate_proj.weight"]), approximate="tanh")
        y = F.linear(gate * F.linear(y, e[p + "mlp.up_proj.weight"]), e[p + "mlp.down_proj.weight"])
        return x + rms_norm(y, e[p + "post_feedforward_layernorm.weight"])

    def embed(self, e, tokens):
        return F.embedding(tokens, e["model.embed_tokens.weight"]).float() * math.sqrt(self.dim)

    def logits(self, e, x):
        return F.linear(rms_norm(x, e["model.norm.weight"]).bfloat16(), e["model.embed_tokens.weight"])

    def hidden(self, e, tokens, masks):
        """Packed rows [batch, length] -> residual stream; masks = (local, global) block masks."""
        x, s = self.embed(e, tokens), tokens.shape[1]
        attend = lambda i, q, k, v: flex_attention(
            q, k, v, block_mask=masks[self.is_global(i)], enable_gqa=True, scale=HEAD_DIM**-0.5)
        for i in range(self.layers):
            cos, sin = self.rope[self.is_global(i)]
            x = self.block(e, i, x, attend, cos[:s], sin[:s])
        return x


class Masks:
    """Block masks of packed rows: causal, inside one document, and within the window if local.

    The document numbers live in one buffer, so that the mask functions are the same each step."""

    def __init__(self, batch, length=CONTEXT, device="cuda"):
        self.doc = torch.zeros(batch, length, dtype=torch.int32, device=device)
        self.shape = (batch, length)
        doc = self.doc

        def globally(b, h, q, k):
            return (q >= k) & (doc[b, q] == doc[b, k])

        def locally(b, h, q, k):
            return (q >= k) & (q - k < WINDOW) & (doc[b, q] == doc[b, k])

        self.mods = (locally, globally)
        self.make = torch.compile(create_block_mask)

    def __call__(self, tokens) -> tuple[BlockMask, BlockMask]:
        self.doc.copy_((tokens == 2).cumsum(1))
        b, s = self.shape
        return tuple(self.make(m, b, None, s, s, device=tokens.device.type) for m in self.mods)
