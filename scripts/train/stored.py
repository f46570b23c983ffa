"""Reads and writes the stored form of the demo's weights (i4-row+h128, i8-row), so that training
can go on from the bundled file. Needs numpy alone.

    python stored.py open draft/demo-target/model.safetensors start.safetensors
    python stored.py close RUN/target.pt model.safetensors    # a .safetensors, too
    python stored.py mix old/model.safetensors new/model.safetensors 0.6 model.safetensors

`open` scales each row by up to a percent, so that the row's root mean square is again that of which
the stored scale is 0.3352 times: rounding the opened weights gives the stored scales and, but for
38 of 106 million, the stored codes. `mix` takes embedding and norms of the new file, and of the
layers' matrices this part of the new file and the rest of the old one."""
import json
import sys

import numpy as np

from hf_files import shapes, to_bf16

I4_STEP = 0.3352
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}


def read(path):
    """Name -> array, in the order of the file; BF16 as its bits."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    header.pop("__metadata__", None)
    return {
        n: np.frombuffer(data[slice(*t["data_offsets"])], DTYPES[t["dtype"]]).reshape(t["shape"])
        for n, t in header.items()
    }


def write(path, tensors):
    names = {np.dtype(v): k for k, v in DTYPES.items()}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for n, t in tensors.items():
        header[n] = {
            "dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]
        }
        at += t.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for t in tensors.values():
            f.write(np.ascontiguousarray(t).tobytes())


def signs(n):
    """`signs` of src/tensor/hadamard.rs, as 1 and -1."""
    x = np.arange(1, n // 32 + 1, dtype=np.uint64) * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
    bits = (x ^ x >> 15)[:, None] >> np.arange(32, dtype=np.uint64) & 1
    return 1 - 2 * bits.astype(np.float32).ravel()


def butterflies(w):
    """The Hadamard transform of each 128 columns, adding in the program's order."""
    shape, w = w.shape, w.reshape(-1, 128).copy()
    half = 64
    while half:
        pairs = w.reshape(len(w), -1, 2, half)
        a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        pairs[:, :, 0], pairs[:, :, 1] = a + b, a - b
        half //= 2
    return w.reshape(shape) * np.float32(0.08838835)


def open_matrix(codes, scales, cols):
    """The weights of which `close_matrix` makes these codes and scales."""
    scales = scales.astype(np.float32)
    if codes.shape[1] == cols:
        return codes.view(np.int8) * scales
    q = np.stack([codes & 15, codes >> 4], 2).reshape(-1, cols).astype(np.float32) - 8
    rms = np.sqrt(np.square(q).mean(1, keepdims=True, dtype=np.float64))
    return butterflies(q * (scales / (I4_STEP * rms)).astype(np.float32)) * signs(cols)


def close_matrix(w, bits):
    if bits == 4:
        w = butterflies(w * signs(w.shape[1]))
        mean = np.square(w.astype(np.float64)).mean(1, keepdims=True)
        scales = np.float32(I4_STEP) * np.sqrt(mean).astype(np.float32)
    else:
        scales = np.abs(w).max(1, keepdims=True) / np.float32(127)
    scales = np.maximum(scales.astype(np.float16), np.float16(6e-8))
    low = -8 if bits == 4 else -127
    q = np.rint(w * (1 / scales.astype(np.float32))).clip(low, 7 if bits == 4 else 127)
    if bits == 8:
        return q.astype(np.int8).view(np.uint8), scales
    q = (q + 8).astype(np.uint8)
    return q[:, ::2] | q[:, 1::2] << 4, scales


def opened(stored):
    """Name -> f32 weights of a stored model."""
    out = {}
    for n, s in shapes("demo-target").items():
        if len(s) == 1:
            out[n] = (stored[n].astype(np.uint32) << 16).view(np.float32)
        else:
            out[n] = open_matrix(stored[n + ".codes"], stored[n + ".scales"], s[1])
    return out


def closed(weights):
    """The tensors of the stored model, in the order of its file."""
    out, sizes = {}, shapes("demo-target")
    # The file has the norms of queries and keys in front of the matrix behind attention.
    names = list(sizes)
    for n in [n for n in names if "o_proj" in n]:
        names.remove(n)
        names.insert(names.index(n.replace("o_proj", "k_norm")) + 1, n)
    for n in names:
        s = sizes[n]
        if len(s) == 1:
            out[n] = to_bf16(weights[n])
        else:
            codes, scales = close_matrix(weights[n], 8 if "embed" in n else 4)
            out |= {n + ".codes": codes, n + ".scales": scales}
    return out


def mixed(old, new, part):
    """The weights of both, in these parts where a layer multiplies by them."""
    return {
        n: w if w.ndim == 1 or "embed" in n else (old[n] * (1 - part) + w * part).astype(np.float32)
        for n, w in new.items()
    }


def main():
    way, source, *others, to = sys.argv[1:]
    if way == "mix":
        new, part = others
        write(to, closed(mixed(opened(read(source)), opened(read(new)), float(part))))
    elif way == "open":
        write(to, opened(read(source)))
    elif source.endswith(".pt"):
        import torch

        weights = torch.load(source, map_location="cpu")["weights"]
        write(to, closed({n: t.detach().float().numpy() for n, t in weights.items()}))
    else:
        write(to, closed(read(source)))


if __name__ == "__main__":
    main()
