"""Makes a small trained model in the shape of Gemma 3 27B. A pass costs as much as 27B's, and the
text stays that of the small model.

    python3 scripts/bench/standin/make.py OUT.gguf [--model draft/demo-target] [--shape 27b]

Needs numpy. The model is one that the project ships, by default the bundled one. The drafts for
Gemma 3 (`--model draft/gemma3-draft/medium`) come without a tokenizer: `--tokenizer` names the
tokenizer.json of a Gemma 3. Tokens without a row in the model's table have a logit of 0.

`--shape own` writes the model in its own shape: Q4_0, its table in Q8_0, with Gemma 3's number of
tokens. If llama.cpp expects a global layer where the model has none, a layer that adds nothing is
inserted. Other shapes copy those blocks. The model's channels become the first ones of each vector,
and RMSNorm weights account for the longer vector's mean. A head's rotated pairs move to the
channels of the longer head with the same frequencies. Extra heads and FFN channels are random, and
their o and down blocks have scale 0; in extra layers all o and down blocks have. Every payload byte
without a meaning is random. The speed of the file is real; the accepted drafts are the small
model's.
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import pathlib
import zlib

import numpy as np

from artifact import weights
from gguf_file import F32, Q4_0, Q8_0, Key, header, q4_0, q8_0, read, size

A = "gemma3."
# As shape keys of a GGUF file.
SHAPES = {
    "27b": dict(dim=5376, layers=62, heads=32, kv=16, head=128, ffn=21504, window=1024),
    "test": dict(dim=1024, layers=24, heads=16, kv=8, head=128, ffn=3072, window=512),
}
# Every sixth layer sees all positions, for llama.cpp too.
GLOBAL_EVERY = 6
# Rows of Gemma 3's table. A pass reads them all. llama.cpp accepts a draft model only with the same
# number.
VOCAB = 262144
ROOT = pathlib.Path(__file__).resolve().parents[3]
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SILENT = ("attn_output", "ffn_down")


def tensors(s, vocab):
    """Returns name -> (type, shape) for a model of shape `s`."""
    d, q, kv, f = s["dim"], s["heads"] * s["head"], s["kv"] * s["head"], s["ffn"]
    of = {
        "attn_norm": d,
        "attn_q": (q, d),
        "attn_k": (kv, d),
        "attn_v": (kv, d),
        "attn_q_norm": s["head"],
        "attn_k_norm": s["head"],
        "attn_output": (d, q),
        "post_attention_norm": d,
        "ffn_norm": d,
        "ffn_gate": (f, d),
        "ffn_up": (f, d),
        "ffn_down": (d, f),
        "post_ffw_norm": d,
    }
    out = {"token_embd.weight": (Q8_0, (vocab, d)), "output_norm.weight": (F32, (d,))}
    for i in range(s["layers"]):
        out |= {
            f"blk.{i}.{n}.weight": (F32, (x,)) if isinstance(x, int) else (Q4_0, x)
            for n, x in of.items()
        }
    return out


def shape_keys(s, eps):
    numbers = {
        "embedding_length": s["dim"],
        "block_count": s["layers"],
        "feed_forward_length": s["ffn"],
        "attention.head_count": s["heads"],
        "attention.head_count_kv": s["kv"],
        "attention.key_length": s["head"],
        "attention.value_length": s["head"],
        "attention.sliding_window": s["window"],
    }
    return {A + k: Key.u32(n) for k, n in numbers.items()} | {
        A + "attention.layer_norm_rms_epsilon": Key.f32(eps)
    }


def vocabulary(path):
    """Returns the keys of the tokenizer: pieces by id, scores by the ranks of merges. Ids without a
    piece are marked as unused."""
    try:
        d = json.loads(pathlib.Path(path).read_text())
    except OSError as e:
        remedy = "name the tokenizer.json of a Gemma 3 with --tokenizer"
        raise SystemExit(f"error: {path} cannot be read: {e.strerror}\nhelp: {remedy}")
    pieces = {i: p for p, i in d["model"]["vocab"].items()}
    special = {t["id"]: t["content"] for t in d["added_tokens"]}
    control = {t["id"] for t in d["added_tokens"] if t["special"]}
    rank = {}
    for merge in d["model"]["merges"]:
        rank.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), len(rank))
    tokens, kinds, scores = [], [], []
    for i in range(VOCAB):
        t = special.get(i) or pieces.get(i)
        tokens.append(t or f"[PAD{i}]")
        byte = t and len(t) == 6 and t.startswith("<0x")
        kinds.append(3 if i in control else 4 if i in special else 5 if not t else 6 if byte else 1)
        # Pieces that no merge produces come last.
        scores.append(-1000.0 if i in special else -float(rank.get(t, 1e6)))
    g = "tokenizer.ggml."
    return {
        g + "model": Key.text("llama"),
        g + "pre": Key.text("default"),
        g + "tokens": Key.array(8, tokens),
        g + "scores": Key.array(6, scores),
        g + "token_type": Key.array(5, kinds),
        g + "bos_token_id": Key.u32(2),
        g + "eos_token_id": Key.u32(1),
        g + "eot_token_id": Key.u32(106),
        g + "padding_token_id": Key.u32(0),
        g + "unknown_token_id": Key.u32(3),
        g + "add_bos_token": Key.bool(True),
        g + "add_eos_token": Key.bool(False),
        g + "add_space_prefix": Key.bool(False),
    }


def is_global(config, layer):
    """Returns whether a layer sees all positions."""
    if kinds := config.get("layer_types"):
        return kinds[layer] == "full_attention"
    return (layer + 1) % config["sliding_window_pattern"] == 0


def rows_of(folder, count):
    """Returns the token of each row of the model's table."""
    for place in (folder, folder.parent):
        if (file := place / "draft_vocabulary.json").exists():
            return np.cumsum(json.loads(file.read_text())["steps"])
    return np.arange(count)


def native(folder, tokenizer, out):
    """Writes the model in its own shape."""
    c, w = weights(folder)
    if c["query_pre_attn_scalar"] != c["head_dim"] or c.get("rope_scaling"):
        what = "scales attention or positions otherwise than small Gemma 3 models do"
        raise SystemExit(f"error: {folder} {what}")
    order, left = [], list(range(c["num_hidden_layers"]))
    while left:
        here = (len(order) + 1) % GLOBAL_EVERY == 0
        order.append(left.pop(0) if is_global(c, left[0]) == here else None)
    s = dict(
        dim=c["hidden_size"],
        layers=len(order),
        heads=c["num_attention_heads"],
        kv=c["num_key_value_heads"],
        head=c["head_dim"],
        ffn=c["intermediate_size"],
        window=c["sliding_window"],
    )
    rows = rows_of(folder, c["vocab_size"])
    table = np.zeros((VOCAB, s["dim"]), np.float32)
    table[rows] = w["model.embed_tokens.weight"]
    keys = {
        "general.architecture": Key.text("gemma3"),
        "general.name": Key.text(f"{folder.name} of this project; not Gemma"),
    }
    keys |= shape_keys(s, c["rms_norm_eps"]) | vocabulary(tokenizer)
    keys |= {
        A + "context_length": Key.u32(c["max_position_embeddings"]),
        A + "vocab_size": Key.u32(VOCAB),
        A + "rope.freq_base": Key.f32(c["rope_theta"]),
        A + "rope.freq_base_swa": Key.f32(c["rope_local_base_freq"]),
        A + "rope.scaling.type": Key.text("none"),
    }
    wanted = tensors(s, VOCAB)
    head, places, end = header(keys, wanted)
    with open(out, "wb") as f:
        f.write(head)
        f.truncate(end)
        for name, (kind, shape) in wanted.items():
            part = name.split(".")
            if name == "token_embd.weight":
                x = table
            elif name == "output_norm.weight":
                x = 1 + w["model.norm.weight"]
            elif order[int(part[1])] is None:
                x = np.zeros(shape, np.float32)
            else:
                x = w[f"model.layers.{order[int(part[1])]}.{NAMES[part[2]]}.weight"] + (kind == F32)
            f.seek(places[name])
            f.write({F32: lambda x: x.astype("<f4"), Q4_0: q4_0, Q8_0: q8_0}[kind](x).tobytes())
    print(f"{folder}: {len(order)} layers, {len(rows)} tokens, {end / 1e9:.2f} GB as Q4_0")


def pairs(small, big):
    """Returns the channels of a longer head that rotate at the frequencies of a shorter head."""
    step, half = big // small, np.arange(small // 2)
    return np.concatenate([half * step, big // 2 + half * step])


def noise(rng, rows, cols):
    """Returns blocks of random codes with a spread of 1 / sqrt(cols)."""
    b = rng.integers(0, 256, (rows, cols // 32, 18), np.uint8)
    b[..., :2] = np.array([1 / math.sqrt(cols) / 4.612], np.float16).view(np.uint8)
    return b


def widened(name, kind, shape, source, s, big):
    """Returns one tensor of the large file."""
    part = name.split(".")[-2]
    d, grow = s["dim"], math.sqrt(s["dim"] / big["dim"])
    rng = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    if kind == F32:
        x = np.ones(shape, np.float32)
        if source is not None:
            v = source[2].view("<f4")
            if part in ("attn_q_norm", "attn_k_norm"):
                x[pairs(s["head"], big["head"])] = v * math.sqrt(s["head"] / big["head"])
                if part == "attn_q_norm":
                    root = big["dim"] / big["heads"] if big["layers"] == 62 else big["head"]
                    x *= math.sqrt(root / s["head"])
            else:
                # The table is scaled down by `grow`, so the last norm is not scaled up as others
                # are.
                x[:d] = v if part == "output_norm" else v * grow
        return x
    b = noise(rng, *shape)
    if part in SILENT:
        b[..., :2] = 0
    if source is None:
        return b
    rows, cols = source[1]
    v = source[2].reshape(rows, cols // 32, 18)
    if part.startswith("ffn_"):
        b[:rows, : cols // 32] = v
    elif part == "attn_output":
        per, wide = s["head"] // 32, big["head"] // 32
        for h in range(s["heads"]):
            b[:rows, h * wide : h * wide + per] = v[:, h * per : (h + 1) * per]
    else:
        group, narrow = s["heads"] // s["kv"], big["heads"] // big["kv"]
        heads = range(s["heads"])
        if part != "attn_q":
            heads = [m * narrow // group for m in range(s["heads"] // narrow)]
        to = np.arange(s["head"]) if part == "attn_v" else pairs(s["head"], big["head"])
        for at, h in enumerate(heads):
            b[at * big["head"] : (at + 1) * big["head"], :, :2] = 0
            b[at * big["head"] + to, : cols // 32] = v[h * s["head"] : (h + 1) * s["head"]]
    return b


@functools.cache
def opened(path):
    """Returns the tensors of a file. Read once per process, because the vocabulary is slow to
    skip."""
    return read(path)[1]


def job(task):
    path, place, name, kind, shape, first, rows, source_path, s, big = task
    source = opened(source_path).get(name)
    if name == "token_embd.weight":
        v = source[2].reshape(source[1][0], -1, 34)[first : first + rows].copy()
        scales = v[..., :2].copy().view(np.float16).astype(np.float32)
        scales *= math.sqrt(s["dim"] / big["dim"])
        v[..., :2] = scales.astype(np.float16).view(np.uint8)
        rng = np.random.Generator(np.random.SFC64(first))
        b = rng.integers(0, 256, (rows, shape[1] // 32, 34), np.uint8)
        b[..., :2] = 0
        b[:, : v.shape[1]] = v
    else:
        b = widened(name, kind, shape, source, s, big)
    with open(path, "r+b") as f:
        f.seek(place)
        f.write(b.tobytes())


def pad(small, shape, out, jobs):
    """Writes the model in `small` in a larger shape."""
    keys, have = read(small)
    get = lambda k: keys[A + k].number()
    s = dict(
        dim=get("embedding_length"),
        layers=get("block_count"),
        heads=get("attention.head_count"),
        kv=get("attention.head_count_kv"),
        head=get("attention.key_length"),
        ffn=get("feed_forward_length"),
    )
    big = SHAPES[shape]
    shared, groups = big["heads"] // big["kv"], s["heads"] // s["kv"]
    if any(s[k] > big[k] for k in s) or big["head"] % s["head"] or groups % shared:
        raise SystemExit(f"error: a model of {s} does not fit into {big}")
    keys |= shape_keys(big, get("attention.layer_norm_rms_epsilon") * s["dim"] / big["dim"])
    keys["general.name"] = Key.text(f"{shape}-shaped stand-in; not Gemma")
    wanted = tensors(big, VOCAB)
    head, places, end = header(keys, wanted)
    with open(out, "wb") as f:
        f.write(head)
        f.truncate(end)
    tasks = []
    for name, (kind, dims) in wanted.items():
        per = 8192 if name == "token_embd.weight" else dims[0]
        for first in range(0, dims[0], per):
            rows = min(per, dims[0] - first)
            place = places[name] + size(kind, (first, *dims[1:]))
            tasks.append((out, place, name, kind, dims, first, rows, small, s, big))
    with multiprocessing.Pool(jobs) as pool:
        for _ in pool.imap_unordered(job, tasks, chunksize=4):
            pass
    print(f"in the shape of {shape}: {end / 1e9:.2f} GB")


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("out", type=pathlib.Path)
    ap.add_argument("--model", type=pathlib.Path, default=ROOT / "draft/demo-target")
    ap.add_argument(
        "--tokenizer", type=pathlib.Path, help="a tokenizer.json [default: the model's]"
    )
    ap.add_argument("--shape", choices=[*SHAPES, "own"], default="27b")
    ap.add_argument("--jobs", type=int, default=os.cpu_count())
    a = ap.parse_args()
    tokenizer = a.tokenizer or a.model / "tokenizer.json"
    # The file appears complete or not at all.
    part, small = (a.out.with_name(f"{a.out.name}.{end}") for end in ("part", "small"))
    try:
        if a.shape == "own":
            native(a.model, tokenizer, part)
        else:
            native(a.model, tokenizer, small)
            pad(small, a.shape, part, a.jobs)
        part.rename(a.out)
    finally:
        part.unlink(missing_ok=True)
        small.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
