"""Batched generation with a key/value cache, in PyTorch. Prompts are left-padded; eager, one step
at a time."""
import torch
import torch.nn.functional as F

from hf_files import HEAD_DIM, WINDOW
from model import Net, layer, rope_tables

EOS, EOT = 1, 106


def pick(logits, temperature, top_k, top_p, g):
    if temperature == 0:
        return logits.argmax(-1)
    top, ids = (logits / temperature).topk(top_k, -1)
    p = top.softmax(-1)
    p = p * (p.cumsum(-1) - p < top_p)
    return ids.gather(-1, torch.multinomial(p / p.sum(-1, keepdim=True), 1, generator=g))[:, 0]


@torch.no_grad()
def generate(net: Net, e, prompts, new=256, temperature=0.0, top_k=64, top_p=0.95, seed=0):
    """prompts: lists of ids. Returns one list of new ids per prompt (end mark included)."""
    dev, b = e["model.norm.weight"].device, len(prompts)
    n = max(map(len, prompts))
    tokens = torch.zeros(b, n, dtype=torch.long)
    for i, p in enumerate(prompts):
        tokens[i, n - len(p) :] = torch.tensor(p)
    tokens = tokens.to(dev)
    first = n - torch.tensor([len(p) for p in prompts], device=dev)
    total = n + new
    tables = {g: rope_tables(1e6 if g else 1e4, total, dev) for g in (True, False)}
    cache = torch.zeros(
        net.layers, 2, b, net.kv_heads, total, HEAD_DIM, dtype=net.dtype, device=dev
    )
    k_pos = torch.arange(total, device=dev)
    rng = torch.Generator(device=dev).manual_seed(seed)
    done, out = torch.zeros(b, dtype=torch.bool, device=dev), []

    def run(ids, at):
        end = at + ids.shape[1]
        q_pos = torch.arange(at, end, device=dev)
        base = (k_pos[None, :end] <= q_pos[:, None])[None] & (
            k_pos[None, None, :end] >= first[:, None, None]
        )
        base = base | (k_pos[None, None, :end] == q_pos[None, :, None])
        near = base & (q_pos[:, None] - k_pos[None, :end] < WINDOW)[None]

        def attend(i, q, k, v):
            cache[i, 0, :, :, at:end], cache[i, 1, :, :, at:end] = k, v
            mask = (base if net.is_global(i) else near)[:, None]
            k, v = cache[i, 0, :, :, :end], cache[i, 1, :, :, :end]
            if q.shape[2] > 1:
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=HEAD_DIM**-0.5, enable_gqa=True
                )
            # One query a sequence: the heads that share keys are rows of one product, so that no
            # key is copied.
            scores = (q.view(b, net.kv_heads, -1, HEAD_DIM) @ k.mT).float() * HEAD_DIM**-0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            return (weights.to(v.dtype) @ v).view(q.shape)

        x = net.embed(e, ids)
        for i in range(net.layers):
            cos, sin = tables[net.is_global(i)]
            x = layer(x, net.weights_of(e, i), cos[at:end], sin[at:end], lambda q, k,
                      v: attend(i, q, k, v))
        return net.logits(e, x[:, -1:]).float()[:, 0]

    logits, at = run(tokens, 0), n
    for step in range(new):
        nxt = torch.where(done, 0, pick(logits, temperature, top_k, top_p, rng))
        out.append(nxt)
        done = done | (nxt == EOS) | (nxt == EOT)
        if step + 1 == new or (step % 32 == 31 and bool(done.all())):
            break
        logits, at = run(nxt[:, None], at), at + 1
    result = []
    for row in torch.stack(out, 1).tolist():
        ends = [i for i, t in enumerate(row) if t in (EOS, EOT)]
        result.append(row[: ends[0] + 1] if ends else row)
    return result


def dense_hidden(net, e, tokens):
    """The result of Net.hidden on packed rows, with plain attention (any device; slow on long
    rows)."""
    n, dev = tokens.shape[1], tokens.device
    pos, doc = torch.arange(n, device=dev), (tokens == 2).cumsum(1)
    base = (pos[:, None] >= pos[None])[None] & (doc[:, :, None] == doc[:, None])
    masks = {True: base[:, None], False: (base & (pos[:, None] - pos[None] < WINDOW))[:, None]}
    x = net.embed(e, tokens)
    for i in range(net.layers):
        g = net.is_global(i)
        cos, sin = rope_tables(1e6 if g else 1e4, n, dev)
        attend = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=masks[g], scale=HEAD_DIM**-0.5, enable_gqa=True)
        x = layer(x, net.weights_of(e, i), cos, sin, attend)
    return x


def effective(net, weights):
    with torch.no_grad():
        return {n: t.detach() for n, t in net.effective(weights, True).items()}
