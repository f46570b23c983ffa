#!/usr/bin/env python3
"""Makes data for the tests on Google's Gemma 3 270M (tests/real_gemma/). scripts/real-gemma.sh runs
it. Needs the Python packages numpy and gguf, and for vectors xllamacpp.

  real.py expand MODEL.gguf F16.gguf
  real.py vectors MODEL.gguf GEMMA OUT.json CODE.txt DOCS.txt PROSE.txt

`expand` writes the model's weights as f16. `vectors` writes token ids, negative log-likelihoods and
the largest logits for the beginnings of three texts, computed in f32 with numpy from the weights
that the gguf package decodes. It also writes llama.cpp's continuations of 20 pieces of these texts.
"""
import json
import subprocess
import sys

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

TOKENS = 640  # of a text
EACH = 8  # every 8th position has its largest logits in the file
PROMPT, WRITTEN = 24, 32  # tokens of a prompt, and of llama.cpp's continuation


def expand(model, out):
    reader, writer = GGUFReader(model), GGUFWriter(out, "gemma3")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.name == "general.file_type":
            writer.add_file_type(1)
        elif field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(field.name, field.contents())
        else:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = np.float16 if values.ndim == 2 else np.float32
        writer.add_tensor(tensor.name, values.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Model:
    """A Gemma 3 in f32."""

    def __init__(self, path):
        reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.fields = reader.fields
        self.embed = self.weights("token_embd")

    def weights(self, name):
        tensor = self.tensors[name + ".weight"]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def number(self, key):
        return self.fields["gemma3." + key].contents()

    def norm(self, x, name):
        eps = self.number("attention.layer_norm_rms_epsilon")
        # A GGUF file holds 1 + weight.
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.weights(name)

    def rotated(self, x, base):
        half = x.shape[-1] // 2
        steps = base ** (-np.arange(half, dtype=np.float64) / half)
        angles = np.arange(len(x))[:, None] * steps
        cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, x, layer):
        name = f"blk.{layer}.attn_"
        heads = self.number("attention.head_count")
        kv_heads = self.number("attention.head_count_kv")
        is_global = layer % 6 == 5
        base = self.number("rope.freq_base") if is_global else 10000.0
        q, k, v = ((x @ self.weights(name + c).T).reshape(len(x), n, -1)
                   for c, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
        q = self.rotated(self.norm(q, name + "q_norm"), base)
        k = self.rotated(self.norm(k, name + "k_norm"), base)
        k, v = (np.repeat(t, heads // kv_heads, 1) for t in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.float32(np.sqrt(q.shape[-1]))
        back = np.arange(len(x))[:, None] - np.arange(len(x))
        seen = (back >= 0) & (is_global | (back < self.number("attention.sliding_window")))
        scores = np.where(seen, scores, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        joined = np.einsum("hij,jhd->ihd", chances, v).reshape(len(x), -1)
        return joined @ self.weights(name + "output").T

    def feed_forward(self, x, layer):
        gate, up, down = (self.weights(f"blk.{layer}.ffn_{c}") for c in ("gate", "up", "down"))
        g = x @ gate.T
        gelu = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
        return (gelu * (x @ up.T)) @ down.T

    def logits(self, ids):
        x = self.embed[ids] * np.float32(np.sqrt(self.embed.shape[1]))
        for layer in range(self.number("block_count")):
            name = f"blk.{layer}."
            out = self.attention(self.norm(x, name + "attn_norm"), layer)
            x = x + self.norm(out, name + "post_attention_norm")
            out = self.feed_forward(self.norm(x, name + "ffn_norm"), layer)
            x = x + self.norm(out, name + "post_ffw_norm")
        return self.norm(x, "output_norm") @ self.embed.T


def vectors(model_path, gemma, out, *texts):
    model, bos, golden = Model(model_path), 2, {"texts": {}, "written": []}
    for kind, path in zip(("code", "docs", "prose"), texts, strict=True):
        command = [gemma, "tokenize", "-q", "--json", "-m", model_path, "-f", path]
        ids = [bos] + json.loads(subprocess.check_output(command))["ids"][: TOKENS - 1]
        z = model.logits(ids)
        most = z.max(-1, keepdims=True)
        total = (most + np.log(np.exp(z - most).sum(-1, keepdims=True)))[:, 0]
        nll = [round(float(total[i] - z[i, ids[i + 1]]), 4) for i in range(len(ids) - 1)]
        top = {}
        for i in range(0, len(ids), EACH):
            best = np.argsort(-z[i], kind="stable")[:8]
            top[i] = [best.tolist(), [round(float(v), 2) for v in z[i, best]]]
        golden["texts"][kind] = {"ids": ids, "nll": nll, "top": top}
        print(kind, len(nll), "tokens, mean NLL", sum(nll) / len(nll))
    golden["written"] = written(model_path, list(golden["texts"].values()), bos)
    with open(out, "w") as file:
        json.dump(golden, file, separators=(",", ":"))
        file.write("\n")


def written(model_path, texts, bos):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.cpuparams.n_threads = model_path, 512, 2
    server, out = xllamacpp.Server(params), []
    for i in range(20):
        from_, text = 1 + 30 * i, texts[i % len(texts)]
        prompt = [bos] + text["ids"][from_ : from_ + PROMPT]
        reply = server.handle_completions({
            "prompt": prompt, "n_predict": WRITTEN, "temperature": 0, "n_probs": 1,
            "cache_prompt": False,
        })
        tokens = reply["choices"][0]["logprobs"]["content"]
        out.append([prompt, [token["id"] for token in tokens]])
    return out


if __name__ == "__main__":
    {"expand": expand, "vectors": vectors}[sys.argv[1]](*sys.argv[2:])
