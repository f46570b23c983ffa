#!/usr/bin/env python3
"""Makes tests/golden/gguf-blocks.json: blocks of GGUF types, decoded by the `gguf` package of
llama.cpp (pip install gguf). With --grids, prints the tables of crates/base/src/tensor/grids.rs.

  blocks.py tests/golden/gguf-blocks.json
  blocks.py --grids

Payload bytes are random; scales (f16) have values that keep the result finite. The SHA-256 of a
grid is computed over its points, with a byte for each coordinate.
"""
import hashlib
import json
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0], "IQ4_XS": [0],
    "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
}


def grid_of(name):
    """Returns the points of a type's grid, if it has one."""
    kind = getattr(quants, name)
    if not kind.grid_shape[0]:
        return None
    kind.init_grid()
    return kind.grid.reshape(kind.grid_shape).astype(np.uint8)


def print_grids():
    """Prints each point as a 16-bit word of the indices of its coordinates among the values."""
    for name in SCALES:
        points = grid_of(name)
        if points is None:
            continue
        places = np.searchsorted(getattr(quants, name).grid_map, points).astype(np.uint16)
        bits = np.arange(points.shape[1], dtype=np.uint16) * (16 // points.shape[1])
        words = ", ".join(f"0x{word:04x}" for word in (places << bits).sum(axis=1))
        print(f"\npub static {name}: [u16; {len(points)}] = [{words}];")


def main():
    if sys.argv[1] == "--grids":
        return print_grids()
    rng = np.random.default_rng(3)
    out = {}
    for name, places in SCALES.items():
        kind = GGMLQuantizationType[name]
        weights, size = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (2 if weights == 32 else 1, size), dtype=np.uint8)
        for at in places:
            scale = rng.standard_normal(len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
        values = quants.dequantize(blocks, kind).astype("<f4")
        out[name] = {"blocks": blocks.tobytes().hex(), "f32": values.tobytes().hex()}
        points = grid_of(name)
        if points is not None:
            out[name]["grid"] = hashlib.sha256(points.tobytes()).hexdigest()
    with open(sys.argv[1], "w") as file:
        json.dump(out, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
