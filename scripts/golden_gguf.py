#!/usr/bin/env python3
"""Golden blocks of GGUF types, decoded by the `gguf` package of llama.cpp (pip install gguf):
tests/golden/gguf-blocks.json.

  golden_gguf.py tests/golden/gguf-blocks.json

Payload bytes are random; scales (f16) are set to values that keep the result finite.
"""
import json
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0], "IQ4_XS": [0],
}


def main():
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
    with open(sys.argv[1], "w") as file:
        json.dump(out, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
