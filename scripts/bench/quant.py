"""Quantises one trained model with this program and with llama.cpp, at equal bytes, and prints the
KL divergence of each result from the model.

    python scripts/bench/quant.py --gemma BIN --llama DIR --model HF_DIR --calibration FILE --text
    KIND=FILE ... --work DIR

llama.cpp's files are dequantised (by the `gguf` package of its project) into plain f32 and
evaluated by the same `gemma eval --reference` as ours: same windows, tokens and arithmetic. So
llama.cpp's figures do not include the error of rounded activations; our own do. Bytes are those of
all files: a GGUF has its vocabulary, our directory has tokenizer.json, config.json and a report.
Finished parts in the work directory are used again."""
import argparse
import json
import pathlib
import shutil
import subprocess

TYPES = ["Q4_K_M", "Q3_K_M", "Q2_K", "IQ3_XXS", "IQ2_M", "IQ2_XXS"]
LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def run(command, log):
    """Runs a command to its end. Its output goes to a file."""
    with open(log, "w") as out:
        subprocess.run([str(c) for c in command], stdout=out, stderr=subprocess.STDOUT, check=True)


def hf_name(name):
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.weight"


def dequantise(gguf_file, model, out):
    """Writes the GGUF's weights as an f32 directory with the model's own config and tokenizer."""
    import gguf
    import numpy as np
    from safetensors.numpy import save_file
    tensors = {}
    for t in gguf.GGUFReader(gguf_file).tensors:
        values = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        values = values.reshape([int(n) for n in reversed(t.shape)])
        if "norm" in t.name:
            values = values - 1.0  # converters store the one that the model adds
        tensors[hf_name(t.name)] = np.ascontiguousarray(values)
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    for f in model.iterdir():
        if f.suffix in (".json", ".jinja") and "index" not in f.name:
            shutil.copy(f, out)


def evaluate(a, directory, name):
    """Returns the KL divergence from the model by kind of text."""
    done = a.work / f"{name}.eval.json"
    if not done.exists():
        found = {}
        for kind, path in a.text:
            command = [
                a.gemma, "eval", "-m", directory, "--reference", a.model, path, "-c", a.window,
                "--json", "-q",
            ]
            out = json.loads(
                subprocess.run([str(c) for c in command], check=True, capture_output=True).stdout
            )
            found[kind] = {
                "tokens": out["tokens"], "top1": out["top1_agreement"],
                "ppl_ratio": out["ppl_ratio"], **out["kld"],
            }
        done.write_text(json.dumps(found))
    return json.loads(done.read_text())


def total(found):
    """Returns means over all tokens, the standard error of the mean divergence, and the largest
    99 % point."""
    n = sum(f["tokens"] for f in found.values())
    mean = lambda key: sum(f["tokens"] * f[key] for f in found.values()) / n
    error = sum((f["tokens"] * f["stderr"]) ** 2 for f in found.values()) ** 0.5 / n
    p99 = max(f["p99"] for f in found.values())
    return {
        "kld": mean("mean"), "error": error, "top1": mean("top1"), "p99": p99,
        "ratio": mean("ppl_ratio"),
    }


def theirs(a):
    """Returns the name, bytes and figures of each of llama.cpp's types."""
    reference = a.work / "reference.gguf"
    if not reference.exists():
        run(
            [a.gemma, "quantize", a.model, reference, "--linear", "f32", "--embedding", "f32"],
            a.work / "reference.log",
        )
    matrix = a.work / "imatrix.gguf"
    if not matrix.exists():
        chunks = ["--chunks", a.tokens // 512]
        run(
            [
                a.llama / "llama-imatrix", "-m", reference, "-f", a.calibration, "-o", matrix, "-c",
                512, *chunks,
            ],
            a.work / "imatrix.log",
        )
    for kind in a.types:
        file, plain = a.work / f"{kind}.gguf", a.work / f"{kind}-f32"
        if not file.exists():
            run(
                [a.llama / "llama-quantize", "--imatrix", matrix, reference, file, kind],
                a.work / f"{kind}.log",
            )
        if not (a.work / f"{kind}.eval.json").exists():
            if not plain.exists():
                dequantise(file, a.model, plain)
            evaluate(a, plain, kind)
            shutil.rmtree(plain)
        yield kind, file.stat().st_size, evaluate(a, plain, kind)


def ours(a, name, size, flags):
    """Returns bytes and figures of our directory of at most `size` bytes. Without a size, the flags
    choose the format."""
    out = a.work / name
    if not out.exists():
        limit = ["--target-size", f"{size} B"] if size else []
        run([a.gemma, "quantize", a.model, out, *limit, *flags], a.work / f"{name}.log")
    return sum(f.stat().st_size for f in out.iterdir()), evaluate(a, out, name)


def row(cells):
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def figures(bytes_, found):
    t = total(found)
    return [
        f"{bytes_ / 1e6:.2f}", f"{t['kld']:.4f} ± {t['error']:.4f}", f"{t['p99']:.2f}",
        f"{100 * t['top1']:.1f}",
    ]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--gemma", type=pathlib.Path, required=True)
    p.add_argument("--llama", type=pathlib.Path, required=True)
    p.add_argument("--model", type=pathlib.Path, required=True)
    p.add_argument("--calibration", type=pathlib.Path, required=True)
    p.add_argument("--text", action="append", required=True, type=lambda t: tuple(t.split("=", 1)))
    p.add_argument("--work", type=pathlib.Path, required=True)
    p.add_argument("--types", nargs="*", default=TYPES)
    p.add_argument("--tokens", type=int, default=32768, help="of calibration text, for both")
    p.add_argument("--window", type=int, default=512)
    p.add_argument(
        "--ablate", action="store_true",
        help="also measure the gain by each part of ours, at the bytes of Q2_K",
    )
    a = p.parse_args()
    a.work.mkdir(exist_ok=True)
    calibrate = ["--calibrate", a.calibration, "--calibrate-tokens", a.tokens]
    row(["at most", "theirs MB", "KLD", "99 %", "top-1 %", "ours MB", "KLD", "99 %", "top-1 %",
         "KLD ours / theirs"])
    row(["---"] + ["---:"] * 9)
    sizes = {}
    for kind, size, found in theirs(a):
        sizes[kind] = size
        mine, own = ours(a, f"ours-{kind}", size, calibrate)
        assert mine <= size, f"{mine} bytes for {size}"
        mean, other = total(own), total(found)
        ratio = mean["kld"] / other["kld"]
        # Treats both errors as independent, although the tokens are the same, so it is too large.
        error = ratio * (
            (mean["error"] / mean["kld"]) ** 2 + (other["error"] / other["kld"]) ** 2
        ) ** 0.5
        row([kind] + figures(size, found) + figures(mine, own) + [f"{ratio:.2f} ± {error:.2f}"])
    if a.ablate:
        print()
        row(["ours, changed in one point", "MB", "KLD", "99 %", "top-1 %"])
        row(["---"] + ["---:"] * 4)
        size = sizes["Q2_K"]
        for name, size, flags in [
            ("as above", size, calibrate),
            ("without text", size, []),
            (
                "all t3, no allocation", None,
                ["--linear", "t3-row+h128", "--embedding", "t4-row+h128", *calibrate],
            ),
            (
                "all t2, no allocation", None,
                ["--linear", "t2-row+h128", "--embedding", "t4-row+h128", *calibrate],
            ),
            (
                "all i2 a row after a Hadamard", None,
                ["--linear", "i2-row+h128", "--embedding", "t4-row+h128", *calibrate],
            ),
            (
                "all i2 a row, no Hadamard", None,
                ["--linear", "i2-row", "--embedding", "t4-row+h128", *calibrate],
            ),
            (
                "all i2 in groups of 128", None,
                ["--linear", "i2-g128", "--embedding", "t4-row+h128", *calibrate],
            ),
        ]:
            label = "ours-Q2_K" if name == "as above" else "ablate-" + name.replace(
                " ", "-"
            ).replace(",", "")
            row([name] + figures(*ours(a, label, size, flags)))


if __name__ == "__main__":
    main()
