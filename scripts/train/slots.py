"""Generation in slots: each slot reads a prompt and writes an answer, one token a pass, and goes on
with the next prompt at once.

All slots take part in every pass, so that a pass has one shape: it is captured once as a CUDA
graph. A prompt is read token by token too; that costs less than to wait for the longest answer of a
batch would.
"""

import time

import torch

from hf_files import HEAD_DIM, WINDOW
from model import Net, queries, rest, rope_tables

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BOS, EOS, EOT = 2, 1, 106
TOP = 16  # how many of the likeliest tokens are kept with their probabilities
SEEN, READ, WRITTEN = (
    0,
    1,
    2,
)  # what a position's next token is: no business of the loss; the prompt's; the target's own

if triton:

    @triton.jit
    def _attend(
        q,
        k,
        v,
        out,
        position,
        room,
        scale,
        window,
        KV: tl.constexpr,
        DIM: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A slot and a key/value head: two queries on the keys from the window's start to the
        slot's position."""
        slot, head = tl.program_id(0), tl.program_id(1)
        last = tl.load(position + slot).to(tl.int32)
        first = tl.maximum(last - window + 1, 0)
        d = tl.arange(0, DIM)
        at = (slot * KV + head) * 2 * DIM + d
        qa, qb = (
            tl.load(q + at).to(tl.float32) * scale,
            tl.load(q + at + DIM).to(tl.float32) * scale,
        )
        base = (slot * KV + head).to(tl.int64) * room * DIM
        ma, mb = tl.full([], -1e30, tl.float32), tl.full([], -1e30, tl.float32)
        la, lb = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        ya, yb = tl.zeros([DIM], tl.float32), tl.zeros([DIM], tl.float32)
        for begin in range(first // BLOCK * BLOCK, last + 1, BLOCK):
            n = begin + tl.arange(0, BLOCK)
            seen = (n >= first) & (n <= last)
            where = base + n[:, None] * DIM + d[None, :]
            keys = tl.load(k + where, mask=seen[:, None], other=0.0).to(tl.float32)
            values = tl.load(v + where, mask=seen[:, None], other=0.0).to(tl.float32)
            sa = tl.where(seen, tl.sum(keys * qa[None, :], 1), -1e30)
            sb = tl.where(seen, tl.sum(keys * qb[None, :], 1), -1e30)
            na, nb = tl.maximum(ma, tl.max(sa, 0)), tl.maximum(mb, tl.max(sb, 0))
            pa, pb = tl.exp(sa - na), tl.exp(sb - nb)
            fa, fb = tl.exp(ma - na), tl.exp(mb - nb)
            la, lb = la * fa + tl.sum(pa, 0), lb * fb + tl.sum(pb, 0)
            ya = ya * fa + tl.sum(pa[:, None] * values, 0)
            yb = yb * fb + tl.sum(pb[:, None] * values, 0)
            ma, mb = na, nb
        tl.store(out + at, (ya / la).to(out.dtype.element_ty))
        tl.store(out + at + DIM, (yb / lb).to(out.dtype.element_ty))


def attend_kernel(q, k, v, position, window):
    """q [slots, heads, 64] with two heads for each of k, v [slots, kv_heads, room, 64]."""
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    slots, kv, room, dim = k.shape
    _attend[(slots, kv)](q, k, v, out, position, room, dim**-0.5, window, KV=kv, DIM=dim, BLOCK=64)
    return out


def attend_plain(q, k, v, position, window):
    slots, kv, room, dim = k.shape
    n = torch.arange(room, device=q.device)
    seen = (n <= position[:, None]) & (n > position[:, None] - window)
    scores = (q.reshape(slots, kv, -1, dim) @ k.mT).float() * dim**-0.5
    p = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return (p.to(v.dtype) @ v).view(q.shape)


class Slots:
    """prompts: (ids, starts, lengths), of which each begins with <bos>. `sampled`: share of the
    slots that draw from the likeliest tokens; the others take the first. An answer ends with an
    end mark, or after `new` tokens."""

    def __init__(self, net: Net, e, prompts, slots, new, sampled=0.0):
        self.net, self.e, self.new = net, e, new
        self.ids, self.starts, self.lengths = prompts
        device = self.ids.device
        self.room = int(self.lengths.max()) + new
        self.tables = {g: rope_tables(1e6 if g else 1e4, self.room, device) for g in (True, False)}
        self.cache = torch.zeros(
            net.layers, 2, slots, net.kv_heads, self.room, HEAD_DIM, dtype=net.dtype, device=device
        )
        self.each = torch.arange(slots, device=device)
        self.heat = (self.each < sampled * slots).float()[:, None]
        number = lambda: torch.zeros(slots, dtype=torch.long, device=device)
        self.token, self.position, self.prompt, self.count = (
            number(),
            number(),
            number(),
            number()[:1],
        )
        # The result of a pass: its input, the next token, and the likeliest candidates.
        self.input, self.kind = number(), number()
        self.top, self.chance = (
            torch.zeros(slots, TOP, dtype=t, device=device) for t in (torch.long, torch.float32)
        )
        self.go_plain()

    def go_plain(self):
        self.attend, self.queries, self.rest, self.head, self.advance = (
            attend_plain,
            queries,
            rest,
            self.scores,
            self.step,
        )
        self.reset()

    def reset(self):
        """Begins with the first prompts again."""
        self.prompt.copy_(self.each % len(self.starts))
        self.count.fill_(len(self.each))
        self.position.zero_()
        self.token.copy_(self.ids[self.starts[self.prompt]])

    def scores(self, norm, embed, x):
        logits = self.net.logits(
            {"model.norm.weight": norm, "model.embed_tokens.weight": embed}, x
        )[:, 0]
        return logits, torch.logsumexp(logits.float(), -1, keepdim=True)

    @torch.no_grad()
    def step(self):
        net, e, at = self.net, self.e, self.position
        x = net.embed(e, self.token[:, None])
        for i in range(net.layers):
            w, (cos, sin) = net.weights_of(e, i), self.tables[net.is_global(i)]
            q, k, v = self.queries(x, w, cos[at][:, None, None], sin[at][:, None, None])
            for kept, fresh in zip(self.cache[i], (k, v)):
                kept[self.each, :, at] = fresh[:, :, 0]
            y = self.attend(
                q[:, :, 0], *self.cache[i], at, self.room if net.is_global(i) else WINDOW
            )
            x = self.rest(x, y.reshape(len(y), 1, -1), w)
        logits, total = self.head(e["model.norm.weight"], e["model.embed_tokens.weight"], x)
        values, top = logits.topk(TOP, -1)
        chance = values.float() - total
        noise = -torch.empty_like(chance).exponential_().clamp_min(1e-9).log()
        choice = top.gather(1, (chance + self.heat * noise).argmax(-1, keepdim=True))[:, 0]

        start, length = self.starts[self.prompt], self.lengths[self.prompt]
        writes = at + 1 >= length
        ends = writes & ((choice == EOS) | (choice == EOT) | (at + 1 >= length + self.new - 1))
        self.input.copy_(self.token)
        self.kind.copy_(torch.where(writes, WRITTEN, READ))
        self.top.copy_(top)
        self.chance.copy_(chance)

        following = torch.where(
            writes, choice, self.ids[start + torch.minimum(at + 1, length - 1)].long()
        )
        prompt = torch.where(
            ends, (self.count + ends.cumsum(0) - 1) % len(self.starts), self.prompt
        )
        self.count += ends.sum()
        self.prompt.copy_(prompt)
        self.token.copy_(torch.where(ends, self.ids[self.starts[prompt]].long(), following))
        self.position.copy_(torch.where(ends, 0, at + 1))

    def run(self, steps):
        """tokens, kind [slots, steps], top, chance [slots, steps, TOP]: what so many passes
        read, and the likeliest tokens behind each."""
        n, device = len(self.each), self.token.device
        if getattr(self, "kept", None) is None or len(self.kept[0]) != steps:
            self.kept = None  # the old ones go before new ones are made
            self.kept = [
                torch.zeros(steps, n, *s, dtype=t, device=device)
                for s, t in (
                    ((), torch.int16),
                    ((), torch.uint8),
                    ((TOP,), torch.int16),
                    ((TOP,), torch.float16),
                )
            ]
        for i in range(steps):
            self.advance()
            for kept, value in zip(self.kept, (self.input, self.kind, self.top, self.chance)):
                kept[i].copy_(value)
        return [k.transpose(0, 1) for k in self.kept]

    def hasten(self, say=print, steps=24, least=0.8):
        """Takes the fastest way of making a pass that works here and gives what the plain one
        gives: `least` is the share of first choices that must be the same (rounding differs, and
        so do choices that are nearly as likely as others)."""
        if self.token.device.type != "cuda":
            return
        self.go_plain()
        plain = [t.clone() for t in self.run(steps)]
        for compiled in (True, False):
            try:
                self.attend, self.advance = attend_kernel, self.step
                wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
                self.queries, self.rest, self.head = wrap(queries), wrap(rest), wrap(self.scores)
                self.capture()
                self.reset()
                torch.cuda.synchronize()
                began = time.time()
                fast = self.run(steps)
                torch.cuda.synchronize()
                took = (time.time() - began) / steps
                read = (plain[1] == READ) & (fast[1] == READ)
                same = (plain[2][..., 0] == fast[2][..., 0])[read].float().mean().item()
                say(
                    f"compiled={compiled}: {took * 1e3:.1f} ms a pass, "
                    f"{len(self.each) / took / 1e3:.0f}k tokens/s, "
                    f"first choices as the plain way's {same:.4f}"
                )
                if same >= least:
                    return self.reset()
            except (
                Exception
            ) as error:  # whatever a kernel or a compiler says: the plain way is left
                say(
                    f"compiled={compiled} does not work here: "
                    f"{type(error).__name__}: {str(error)[:300]}"
                )
        self.go_plain()

    def capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.graph, self.advance = graph, graph.replay
