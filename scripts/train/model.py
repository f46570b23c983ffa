"""Gemma 3 (text) in PyTorch, as trained here: exact semantics, 4-bit fake quantisation, flex
attention.

Weights live in one flat dict of f32 tensors under their Hugging Face names. `effective` turns them
into what the quantiser will store (straight-through gradients); `Net.hidden` runs the stack on
those."""
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from hf_files import CONTEXT, HEAD_DIM, MODELS, VOCAB, WINDOW, shapes

EPS = 1e-6
I4_STEP = 0.3352  # step of the 4-bit grid in units of a row's root mean square


def hadamard(n=128, device="cuda"):
    """Sylvester's matrix scaled to be orthonormal: H[i][j] = (-1)^popcount(i & j) / sqrt(n)."""
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / math.sqrt(n)


def signs(n, device="cuda"):
    """The signs that the program multiplies columns by before a Hadamard transform: `signs` in
    src/tensor/hadamard.rs, as 1 and -1."""
    x = np.arange(1, n // 32 + 1, dtype=np.uint64) * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
    bits = (x ^ x >> 15)[:, None] >> np.arange(32, dtype=np.uint64) & 1
    return torch.from_numpy(1 - 2 * bits.astype(np.float32)).flatten().to(device)


class Turn:
    """Signs, then a Hadamard transform of each 128 columns: the basis in which weights and inputs
    are rounded."""

    def __init__(self, most=8192, device="cuda"):
        self.h, self.signs = hadamard(device=device), signs(most, device)

    def there(self, x):
        return ((x * self.signs[: x.shape[-1]]).unflatten(-1, (-1, 128)) @ self.h).flatten(-2)

    def back(self, x):
        return (x.unflatten(-1, (-1, 128)) @ self.h).flatten(-2) * self.signs[: x.shape[-1]]


def quantise_i4(w, turn):
    """4 bits per weight, one f16 scale per row, behind signs and Hadamard."""
    wh = turn.there(w)
    s = (I4_STEP * wh.square().mean(1, keepdim=True).sqrt()).half().float().clamp_min(6e-8)
    return turn.back(torch.clamp(torch.round(wh / s), -8, 7) * s)


def quantise_i8(w):
    """8 bits per weight, one f16 scale per row."""
    s = (w.abs().amax(1, keepdim=True) / 127).half().float().clamp_min(6e-8)
    return torch.clamp(torch.round(w / s), -127, 127) * s


def quantise_act(x, turn):
    """Inputs of a linear layer as the program rounds them: 8 bits, one scale per row, in the basis
    of the weights; straight-through."""
    with torch.no_grad():
        xh = turn.there(x.float())
        s = xh.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 127
        rounded = turn.back((xh / s).round() * s)
    return x + (rounded - x).to(x.dtype).detach()


class StraightThrough(torch.autograd.Function):
    """f(w) forwards, the identity backwards."""

    @staticmethod
    def forward(ctx, w, f):
        return f(w)

    @staticmethod
    def backward(ctx, grad):
        return grad.float(), None


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


PARTS = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
         "self_attn.q_norm",
         "self_attn.k_norm", "self_attn.o_proj", "post_attention_layernorm",
         "pre_feedforward_layernorm",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_feedforward_layernorm")


def queries(x, w, cos, sin, act=lambda t: t):
    """The inputs of attention: queries, keys and values [batch, heads, length, 64] of the
    residual stream x."""
    norm1, wq, wk, wv, norm_q, norm_k = w[:6]
    b, s, _ = x.shape
    split = lambda t: t.view(b, s, -1, HEAD_DIM).transpose(1, 2)
    y = act(rms_norm(x, norm1).to(wq.dtype))
    q = rope(rms_norm(split(F.linear(y, wq)), norm_q), cos, sin).to(wq.dtype)
    k = rope(rms_norm(split(F.linear(y, wk)), norm_k), cos, sin).to(wq.dtype)
    return q, k, split(F.linear(y, wv))


def rest(x, y, w, act=lambda t: t):
    """The residual stream behind a layer, from that in front of it and the output y of attention
    [batch, length, heads * 64]."""
    wo, norm2, norm3, gate, up, down, norm4 = w[6:]
    x = x + rms_norm(F.linear(act(y), wo), norm2)
    y = act(rms_norm(x, norm3).to(wo.dtype))
    y = F.linear(act(F.gelu(F.linear(y, gate), approximate="tanh") * F.linear(y, up)), down)
    return x + rms_norm(y, norm4)


def layer(x, w, cos, sin, attend, turn=None):
    """One layer on the residual stream x [batch, length, dim]; w: its weights in the order of
    PARTS; attend(q, k, v) on [batch, heads, length, 64]; turn: rounds the inputs of linears to 8
    bits in this basis."""
    act = (lambda t: t) if turn is None else (lambda t: quantise_act(t, turn))
    y = attend(*queries(x, w, cos, sin, act)).transpose(1, 2)
    return rest(x, y.reshape(*x.shape[:2], -1), w, act)


@torch.compile
def packed_layer(x, w, cos, sin, mask, turn=None):
    attend = lambda q, k, v: flex_attention(
        q, k, v, block_mask=mask, enable_gqa=True, scale=HEAD_DIM**-0.5
    )
    return layer(x, w, cos, sin, attend, turn)


class Net:
    def __init__(self, name, device="cuda"):
        m = MODELS[name]
        self.name, self.dim, self.layers = name, m["dim"], m["layers"]
        self.heads, self.kv_heads, self.pattern = m["heads"], m["kv_heads"], m["pattern"]
        self.embed_i4 = name == "demo-draft"
        # of activations and linears; f32 only to compare with transformers
        self.dtype = torch.bfloat16
        self.turn = Turn(device=device)
        self.rope = {True: rope_tables(1e6, device=device), False: rope_tables(1e4, device=device)}

    def init(self, seed, device="cuda"):
        """Random f32 weights; the norms after each block start small so that the residual stays
        tame."""
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
                out[n] = StraightThrough.apply(t, lambda x: x.bfloat16().float()) if quant else t
                continue
            if quant:
                i4 = self.embed_i4 or "embed" not in n
                t = StraightThrough.apply(
                    t, (lambda x: quantise_i4(x, self.turn)) if i4 else quantise_i8
                )
            out[n] = t.to(self.dtype)
        return out

    def weights_of(self, e, i):
        return [e[f"model.layers.{i}.{p}.weight"] for p in PARTS]

    def embed(self, e, tokens):
        return F.embedding(tokens, e["model.embed_tokens.weight"]).float() * math.sqrt(self.dim)

    def logits(self, e, x):
        return F.linear(
            rms_norm(x, e["model.norm.weight"]).to(self.dtype), e["model.embed_tokens.weight"]
        )

    def hidden(self, e, tokens, masks):
        """Packed rows [batch, length] -> residual stream; masks = (local, global) block masks."""
        x, s = self.embed(e, tokens), tokens.shape[1]
        for i in range(self.layers):
            cos, sin = self.rope[self.is_global(i)]
            x = packed_layer(x, self.weights_of(e, i), cos[:s], sin[:s], masks[self.is_global(i)])
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
