"""Reads the models that the project ships, written by `gemma quantize`, as float weights
(NumPy)."""

import json
import pathlib

import numpy as np

WIDTH = 128  # columns of one Hadamard transform


def signs(cols):
    """Returns -1 or 1 for each column, from a hash of its index (see
    crates/base/src/tensor/hadamard.rs)."""
    x = np.arange(1, cols // 32 + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ x >> 16) * np.uint32(0x21F0AAAD)
    x = (x ^ x >> 15) * np.uint32(0x735A2D97)
    x ^= x >> 15
    bits = x[:, None] >> np.arange(32, dtype=np.uint32) & 1
    return 1 - 2 * bits.reshape(-1).astype(np.float32)


def turned_back(x):
    """Undoes the Hadamard transform and the signs of `+h128`."""
    h = np.ones((1, 1), np.float32)
    while len(h) < WIDTH:
        h = np.block([[h, h], [h, -h]])
    return (x.reshape(-1, WIDTH) @ (h / np.sqrt(np.float32(WIDTH)))).reshape(x.shape) * signs(
        x.shape[1]
    )


def dequantized(format, codes, scales):
    """Dequantises a matrix in one of the shipped formats: 4-bit or 8-bit codes, a scale per row."""
    code, _, hadamard = format.partition("+")
    if code == "i8-row":
        x = codes.view(np.int8).astype(np.float32)
    elif code == "i4-row":
        x = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1).astype(np.float32) - 8
    else:
        raise SystemExit(
            f"error: weights of the format {format} are not read here, only i4-row and i8-row"
        )
    x *= scales.astype(np.float32)
    return turned_back(x) if hadamard else x


def tensors(path):
    """Returns the arrays of a safetensors file by name. bf16 becomes f32."""
    data = np.memmap(path, np.uint8, "r")
    head = 8 + int(data[:8].view("<u8")[0])
    out = {}
    for name, t in json.loads(bytes(data[8:head])).items():
        if name != "__metadata__":
            raw = data[head + t["data_offsets"][0] : head + t["data_offsets"][1]]
            if t["dtype"] == "BF16":
                x = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                x = raw.view({"U8": np.uint8, "F16": "<f2", "F32": "<f4"}[t["dtype"]])
            out[name] = x.reshape(t["shape"])
    return out


def weights(folder):
    """Returns `config.json`, and the float weights by name."""
    folder = pathlib.Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        stored = tensors(folder / "model.safetensors")
    except OSError as e:
        remedy = "name a model with --model, such as draft/demo-target"
        raise SystemExit(f"error: {e.filename} cannot be read: {e.strerror}\nhelp: {remedy}")
    formats = config.get("quantization_config", {}).get("formats", {})
    out = {n: x for n, x in stored.items() if not n.endswith((".codes", ".scales"))}
    return config, out | {
        n: dequantized(f, stored[n + ".codes"], stored[n + ".scales"]) for n, f in formats.items()
    }
