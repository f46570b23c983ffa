"""Trains a pair in Gemma 4's shape: a target, its assistant, and a plain draft of as many bytes.

    python gemma4_pair.py target    --data pair.xz --tokenizer DIR --out RUN --seconds 180
    python gemma4_pair.py assistant --data pair.xz --tokenizer DIR --out RUN --seconds 120
    python gemma4_pair.py draft     --data pair.xz --tokenizer DIR --out RUN --seconds 120
    python gemma4_pair.py check     --data pair.xz --out RUN    # needs transformers, runs on a CPU

gemma4_pair_data.py makes pair.xz. DIR holds the tokenizer's files, for example draft/demo-target.
Each stage writes RUN/NAME as a Hugging Face directory in bf16, and RUN/NAME.pt. The later stages
read the target from its .pt. The target learns the text. The others learn its distribution.

The assistant has queries only. For a root at position n it reads the target's keys and values of
positions 0 to n - 1, its hidden state of position n - 1, and the token at n. Each further drafted
position reads the next token of the text and the assistant's own projected state, with the same
keys and the same position n."""
import argparse
import json
import lzma
import math
import os
import shutil
import time

import numpy as np
import torch
import torch.nn.functional as F

from ddp import Clock
from hf_files import VOCAB, write_safetensors
from model import rope
from optim import Optim

EPS, DEPTHS = 1e-6, 4  # DEPTHS: drafted positions in the log
SHARES = 0.5, 0.25, 0.25  # of the drafted positions in the loss; the first one matters most
STEPS = len(SHARES)
LOCAL, GLOBAL = "sliding_attention", "full_attention"
NAMES = {"target": "gemma4-pair", "assistant": "gemma4-pair-assistant",
         "draft": "gemma4-pair-draft"}
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
         "post_feedforward_layernorm")


def text_config(dim, ffn, types, heads, kv_heads, head_dim, window, length, **more):
    """Returns a configuration; `kv_heads` and `head_dim` are pairs, of local and global layers."""
    return {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": VOCAB,
        "hidden_size": dim, "intermediate_size": ffn, "num_hidden_layers": len(types),
        "layer_types": types, "num_attention_heads": heads, "num_key_value_heads": kv_heads[0],
        "num_global_key_value_heads": kv_heads[1], "head_dim": head_dim[0],
        "global_head_dim": head_dim[1], "attention_k_eq_v": True, "sliding_window": window,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 1e4},
            GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        "attention_bias": False, "final_logit_softcapping": 30.0, "num_kv_shared_layers": 0,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "max_position_embeddings": length, "rms_norm_eps": EPS,
        "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": [1, 106],
        "pad_token_id": 0, "dtype": "bfloat16",
    } | more  # fmt: skip


def configs(small, length):
    """Maps stages to configurations. The assistant and the draft have as many parameters."""
    third = lambda n: [GLOBAL if i % 3 == 2 else LOCAL for i in range(n)]
    shared = dict(kv_heads=(4, 2), head_dim=(64, 128), window=32 if small else 256, length=length)
    last = [LOCAL] * 3 + [GLOBAL]
    if small:
        return {"target": text_config(64, 128, third(3), 4, **shared),
                "assistant": text_config(32, 64, last, 4, **shared, num_kv_shared_layers=4),
                "draft": text_config(32, 64, last, 4, **shared)}
    return {"target": text_config(512, 2048, third(12), 8, **shared),
            "assistant": text_config(128, 768, last, 4, **shared, num_kv_shared_layers=4),
            "draft": text_config(128, 816, last, 4, **shared | dict(kv_heads=(2, 1)))}


def heads_of(c, kind):
    """Returns the heads of queries, the heads of keys and the channels of a head."""
    part = "global_" if kind == GLOBAL else ""
    return c["num_attention_heads"], c[f"num_{part}key_value_heads"], c[f"{part}head_dim"]


def shapes(c, backbone):
    """Maps tensor names to shapes; `backbone`: the target's width in an assistant, else 0."""
    d, ffn = c["hidden_size"], c["intermediate_size"]
    out = {"model.embed_tokens.weight": (VOCAB, d), "model.norm.weight": (d,)}
    if backbone:
        out |= {"pre_projection.weight": (d, 2 * backbone), "post_projection.weight": (backbone, d)}
    for i, kind in enumerate(c["layer_types"]):
        n, n_kv, head = heads_of(c, kind)
        part = {f"{name}.weight": (d,) for name in NORMS} | {
            "layer_scalar": (1,), "self_attn.q_proj.weight": (n * head, d),
            "self_attn.q_norm.weight": (head,), "self_attn.o_proj.weight": (d, n * head),
            "mlp.gate_proj.weight": (ffn, d), "mlp.up_proj.weight": (ffn, d),
            "mlp.down_proj.weight": (d, ffn)}
        if not backbone:
            part["self_attn.k_norm.weight"] = (head,)
            part["self_attn.k_proj.weight"] = (n_kv * head, d)
            if kind == LOCAL:
                part["self_attn.v_proj.weight"] = (n_kv * head, d)
        out |= {f"model.layers.{i}.{name}": s for name, s in part.items()}
    return out


def start(c, backbone, seed, device):
    """Returns random f32 weights. Scores start at the usual scale; blocks add little at first."""
    g, w = torch.Generator().manual_seed(seed), {}
    for name, s in shapes(c, backbone).items():
        if len(s) == 2:
            t = torch.randn(s, generator=g) * (0.02 if "embed" in name else 0.7 * s[1] ** -0.5)
        else:
            heads, after = "q_norm" in name or "k_norm" in name, "post_" in name
            t = torch.full(s, s[0] ** -0.25 if heads else 0.3 if after else 1.0)
        w[name] = t.to(device).requires_grad_()
    return w


def norm(x, w=None):
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x if w is None else x * w


def layer(x, w, n_heads, head_dim, turn, mask, kv):
    """Runs a layer on the residual stream x [batch, length, dim]; returns it, keys and values.

    `w`: its weights by name; `turn`: cosines and sines; `mask`: None is causal; `kv`: keys and
    values of the target for an assistant, else None."""
    split = lambda t: t.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    y = norm(x, w["input_layernorm.weight"])
    q = rope(norm(split(F.linear(y, w["self_attn.q_proj.weight"])), w["self_attn.q_norm.weight"]),
             *turn)
    if kv is None:
        k = split(F.linear(y, w["self_attn.k_proj.weight"]))
        own = w.get("self_attn.v_proj.weight")
        v = norm(k if own is None else split(F.linear(y, own)))
        kv = rope(norm(k, w["self_attn.k_norm.weight"]), *turn), v
    k, v = (t.repeat_interleave(n_heads // t.shape[1], 1) for t in kv)
    y = F.scaled_dot_product_attention(q, k.type_as(q), v.type_as(q), mask, is_causal=mask is None,
                                       scale=1.0)
    y = F.linear(y.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"])
    x = x + norm(y, w["post_attention_layernorm.weight"])
    y = norm(x, w["pre_feedforward_layernorm.weight"])
    y = F.gelu(F.linear(y, w["mlp.gate_proj.weight"]), approximate="tanh") * F.linear(
        y, w["mlp.up_proj.weight"])
    x = x + norm(F.linear(y, w["mlp.down_proj.weight"]), w["post_feedforward_layernorm.weight"])
    return x * w["layer_scalar"], kv


def cross_entropy(h, table, cap, wanted):
    """Returns the mean cross entropy of h [n, dim] against `wanted`, ids or logits."""
    s = capped(F.linear(h, table).float(), cap)
    if wanted.dim() == 1:
        return F.cross_entropy(s, wanted, ignore_index=-100)
    return (s.logsumexp(-1) - (wanted.float().softmax(-1) * s).sum(-1)).mean()


def capped(s, cap):
    return s if cap is None else cap * torch.tanh(s / cap)


class Net:
    """A model's forward pass on packed rows; `table` is the embedding, which is also the head."""

    def __init__(self, c, w, shift=0):
        self.c, self.w, self.table = c, w, w["model.embed_tokens.weight"]
        # An assistant's logits are not capped.
        self.cap = None if shift else c["final_logit_softcapping"]
        device, length = self.table.device, c["max_position_embeddings"] + max(STEPS, DEPTHS)
        at = torch.arange(length, device=device)
        # A root of the assistant at n stands in the row of n - 1, so its `shift` is 1.
        ago = at[:, None] - at[None]
        self.mask = (ago >= 0) & (ago < c["sliding_window"] - shift)
        self.turn = {}
        for kind, spec in c["rope_parameters"].items():
            pairs = heads_of(c, kind)[2] // 2
            inv = spec["rope_theta"] ** (-torch.arange(pairs, device=device).float() / pairs)
            inv[int(pairs * spec.get("partial_rotary_factor", 1)) :] = 0
            angle = torch.outer((at + shift).float(), inv).repeat(1, 2)
            self.turn[kind] = angle.cos(), angle.sin()

    def embed(self, tokens):
        return F.embedding(tokens, self.table).float() * math.sqrt(self.c["hidden_size"])

    def hidden(self, x, shared=None):
        """Returns final-norm states of the stream x, and the last keys and values of each kind."""
        n, kept = x.shape[1], {}
        for i, kind in enumerate(self.c["layer_types"]):
            start = f"model.layers.{i}."
            w = {k.removeprefix(start): t for k, t in self.w.items() if k.startswith(start)}
            heads, _, head_dim = heads_of(self.c, kind)
            mask = self.mask[:n, :n] if kind == LOCAL else None
            x, kept[kind] = layer(x, w, heads, head_dim, [t[:n] for t in self.turn[kind]], mask,
                                  shared and shared[kind])
        return norm(x, self.w["model.norm.weight"]), kept

    def logits(self, h):
        return capped(F.linear(h, self.table).float(), self.cap)


def drafted(assistant, target, tokens, h, shared, steps):
    """Yields the states of each drafted position of the roots at 1 to length - steps.

    `h` and `shared` are the target's on `tokens` [batch, length]."""
    n = tokens.shape[1] - steps
    shared = {kind: [t[:, :, :n] for t in kv] for kind, kv in shared.items()}
    state, embedded = h[:, :n], target.embed(tokens)
    for j in range(steps):
        x = torch.cat([embedded[:, j + 1 : j + 1 + n], state], -1)
        y, _ = assistant.hidden(F.linear(x, assistant.w["pre_projection.weight"]).float(), shared)
        yield y
        state = F.linear(y, assistant.w["post_projection.weight"])


def text(path, device):
    """Returns the ids of the training text and of the held-out text."""
    with lzma.open(path) as f:
        return [torch.from_numpy(np.load(f).astype(np.int16)).to(device) for _ in range(2)]


def rows_at(ids, starts, length):
    """Returns rows of ids from these starts on, each behind one <bos>."""
    at = starts.to(ids.device)[:, None] + torch.arange(length, device=ids.device)
    rows = ids[at].long()
    rows[:, 0] = 2
    return rows


def held_rows(ids, most, length):
    return rows_at(ids, torch.arange(min(most, len(ids) // length)) * length, length)


def teacher(target, tokens):
    """Returns the target's final-norm states, last keys and values, and logits."""
    with torch.no_grad():
        h, shared = target.hidden(target.embed(tokens))
        return h, shared, target.logits(h)


def loss_of(stage, net, target, tokens):
    """Returns the loss on rows of tokens: against the text for the target, else the target."""
    if stage == "assistant":
        h, shared, wanted = teacher(target, tokens)
        return sum(
            share * cross_entropy(y.flatten(0, 1), net.table, None,
                                  wanted[:, j + 1 : j + 1 + y.shape[1]].flatten(0, 1))
            for j, (share, y) in enumerate(
                zip(SHARES, drafted(net, target, tokens, h, shared, STEPS), strict=True))
        )  # fmt: skip
    if stage == "target":
        wanted = tokens[:, 1:].masked_fill(tokens[:, 1:] == 2, -100).flatten()
        tokens = tokens[:, :-1]
    else:
        wanted = teacher(target, tokens)[2].flatten(0, 1)
    h = net.hidden(net.embed(tokens))[0].flatten(0, 1)
    return cross_entropy(h, net.table, net.cap, wanted)


@torch.no_grad()
def held_out(stage, net, target, rows):
    """Describes the loss and, by depth, the share of the target's first choices that are guessed.

    `unbroken` counts a depth only where the depths before it are guessed."""
    losses, found = [], []
    for tokens in rows.split(8):
        losses.append(loss_of(stage, net, target, tokens))
        if stage == "target":
            continue
        h, shared, wanted = teacher(target, tokens)
        best = wanted.argmax(-1)
        if stage == "draft":
            hits = [net.logits(net.hidden(net.embed(tokens))[0]).argmax(-1) == best]
        else:
            hits = [net.logits(y).argmax(-1) == best[:, j + 1 : j + 1 + y.shape[1]]
                    for j, y in enumerate(drafted(net, target, tokens, h, shared, DEPTHS))]
        hits = torch.stack(hits).float()
        found.append(torch.stack([hits.mean((1, 2)), hits.cumprod(0).mean((1, 2))]))
    line = f"held-out loss {torch.stack(losses).mean().item():.4f}"
    if found:
        share, unbroken = (" ".join(f"{v:.3f}" for v in row)
                           for row in torch.stack(found).mean(0).tolist())
        line += f", agreement by depth {share}, unbroken {unbroken}"
    return line


def export(stage, c, w, out, tokenizer, backbone):
    folder = os.path.join(out, NAMES[stage])
    os.makedirs(folder, exist_ok=True)
    if stage == "assistant":
        c = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
             "backbone_hidden_size": backbone, "use_ordered_embeddings": False,
             "tie_word_embeddings": True, "dtype": "bfloat16",
             "text_config": c | {"final_logit_softcapping": None}}
    else:
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(os.path.join(tokenizer, file), os.path.join(folder, file))
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(c, f, indent=2)
        f.write("\n")
    bits = {n: t.detach().bfloat16().cpu().view(torch.int16).numpy() for n, t in w.items()}
    write_safetensors(os.path.join(folder, "model.safetensors"), bits)
    weights = {n: t.detach().cpu() for n, t in w.items()}
    torch.save({"config": c, "weights": weights}, folder + ".pt")


def read(a, stage, device):
    """Returns a stage's model with the weights of its directory, rounded to bf16."""
    saved = torch.load(os.path.join(a.out, NAMES[stage] + ".pt"), map_location=device)
    c = saved["config"].get("text_config", saved["config"])
    w = {n: t.bfloat16().float() for n, t in saved["weights"].items()}
    return Net(c, w, shift=int(stage == "assistant"))


def train(a, device):
    c = configs(a.small, a.length)[a.stage]
    target = None if a.stage == "target" else read(a, "target", device)
    backbone = target.c["hidden_size"] if a.stage == "assistant" else 0
    w = start(c, backbone, a.seed, device)
    print(a.stage, f"{sum(t.numel() for t in w.values()) / 1e6:.2f} M parameters", flush=True)
    net, optim = Net(c, w, shift=int(backbone > 0)), Optim(w)
    ids, held = text(a.data, device)
    length = a.length + (STEPS if backbone else 1 if target is None else 0)
    half = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    g = torch.Generator().manual_seed(a.seed)
    clock, step, began = Clock(a.steps, None if a.steps else a.seconds), 0, time.time()
    while clock.more(step):
        rows = rows_at(ids, torch.randint(0, len(ids) - length, (a.rows,), generator=g), length)
        with half:
            loss = loss_of(a.stage, net, target, rows)
        loss.backward()
        # The rate rises for 100 steps, stays, and falls to 0 over the last 70 % of the time.
        optim.step(a.lr * min(1, (step + 1) / 100, (1 - clock.done(step)) / 0.7))
        step += 1
        if step in (1, 10, 40) or step % 200 == 0:
            seconds = time.time() - began
            memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0
            print(f"{a.stage} {step}/{clock.steps} loss {loss.item():.4f} {seconds:.0f} s "
                  f"{step * a.rows * a.length / seconds / 1e3:.0f}k tok/s {memory:.0f} GiB",
                  flush=True)  # fmt: skip
        if step % 500 == 0:
            export(a.stage, c, w, a.out, a.tokenizer, backbone)
    export(a.stage, c, w, a.out, a.tokenizer, backbone)
    print(f"{a.stage}: {step} steps, {step * a.rows * a.length / 1e6:.1f} M tokens, "
          f"{time.time() - began:.0f} s", flush=True)  # fmt: skip
    rows = held_rows(held, a.held, a.length + DEPTHS if backbone else length)
    with half, torch.compiler.set_stance("force_eager"):
        print(held_out(a.stage, net, target, rows), flush=True)


@torch.no_grad()
def check(a):
    """Compares logits with those of transformers: the target's, and a chain of the assistant's."""
    from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

    path = lambda stage: os.path.join(a.out, NAMES[stage])
    options = dict(dtype=torch.float32, attn_implementation="eager")
    tokens = held_rows(text(a.data, "cpu")[1], 1, a.length)
    for stage in ("target", "draft"):
        other = Gemma4ForCausalLM.from_pretrained(path(stage), **options)
        net = read(a, stage, "cpu")
        theirs, ours = other(tokens).logits, net.logits(net.hidden(net.embed(tokens))[0])
        worst = (theirs - ours).abs().max()
        print(f"{stage}: logits of {a.length} positions differ by {worst:.1e}")
    target, net = read(a, "target", "cpu"), read(a, "assistant", "cpu")
    other = Gemma4ForCausalLM.from_pretrained(path("target"), **options)
    assistant = Gemma4AssistantForCausalLM.from_pretrained(path("assistant"), **options)
    h, shared = target.hidden(target.embed(tokens))
    steps = [net.logits(y) for y in drafted(net, target, tokens, h, shared, DEPTHS)]
    n, seen = a.length - DEPTHS, net.c["sliding_window"] - 1
    out = other(tokens[:, :n], output_hidden_states=True, return_shared_kv_states=True)
    shared, state, worst = dict(out.shared_kv_states), out.hidden_states[-1][:, -1:], 0
    shared[LOCAL] = tuple(t[:, :, -seen:] for t in shared[LOCAL])
    for j, ours in enumerate(steps):
        x = torch.cat([other.get_input_embeddings()(tokens[:, n + j : n + j + 1]), state], -1)
        got = assistant(inputs_embeds=x, position_ids=torch.tensor([[n]]), shared_kv_states=shared)
        state = got.last_hidden_state
        worst = max(worst, (got.logits[0, 0] - ours[0, n - 1]).abs().max().item())
    print(f"assistant: logits of {DEPTHS} positions from root {n} on differ by {worst:.1e}")


def main():
    global layer, cross_entropy
    ap = argparse.ArgumentParser()
    ap.add_argument("stage", choices=(*NAMES, "check"))
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--tokenizer", help="folder of the tokenizer's files")
    ap.add_argument("--seconds", type=float, default=120)
    ap.add_argument("--steps", type=int, help="in place of --seconds")
    ap.add_argument("--rows", type=int, default=32, help="rows of a step")
    ap.add_argument("--length", type=int, default=1024, help="tokens of a row")
    ap.add_argument("--held", type=int, default=128, help="held-out rows at most")
    ap.add_argument("--lr", type=float, default=1.0, help="factor on the learning rates")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--small", action="store_true", help="tiny shapes, for a test on a CPU")
    ap.add_argument("--compile", action="store_true", help="compile layers and losses")
    a = ap.parse_args()
    if a.stage == "check":
        return check(a)
    os.makedirs(a.out, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    if a.compile:
        torch._dynamo.config.cache_size_limit = 64
        layer, cross_entropy = (torch.compile(f, dynamic=False) for f in (layer, cross_entropy))
    train(a, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
