#!/usr/bin/env python3
"""Compares a build's command line with transformers: likelihoods of the texts with images in
tests/golden/vision, by `gemma eval --ids --image` with image files.

    scripts/check/images.py GEMMA [OPTION...]

OPTIONs go to gemma, such as `-d vulkan`. Prints the worst difference of each text in nats, and
exits with 1 if one is above 0.002.
"""

import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "tests/golden/vision"
SOFT = 252
MOST = 2e-3


def picture(width, height, seed, faint):
    """The picture of scripts/golden/vision.py, as rows of RGB bytes."""
    for y in range(height):
        row = bytearray()
        for x in range(width):
            for c in range(3):
                value = x * (7 + 5 * c) + y * (11 + 3 * seed) + ((x * y) >> (2 + c)) * (seed + 1)
                value = (value + 40 * c + ((x ^ y) & 31) * 3) & 255
                row.append((value >> 6) + 100 if faint else value)
        yield bytes(row)


def png(path, width, height, rows):
    def chunk(kind, data):
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def main(gemma, *options):
    worst = 0
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        for family in "gemma3", "gemma4", "gemma4-unified":
            golden = json.loads((GOLDEN / family / "golden.json").read_text())
            for i, image in enumerate(golden["images"]):
                (width, height), seed = image["size"], image["seed"]
                rows = picture(width, height, seed, image["is_faint"])
                png(place / f"{i}.png", width, height, rows)
            for text in golden["texts"]:
                model = place / "model"
                shutil.copytree(GOLDEN / family, model, dirs_exist_ok=True)
                config = json.loads((model / "config.json").read_text())
                config["text_config"]["sliding_window"] = text["window"]
                (model / "config.json").write_text(json.dumps(config))
                (place / "ids.json").write_text(json.dumps({"ids": text["ids"]}))
                shown = [w for i in text["images"] for w in ("--image", place / f"{i}.png")]
                words = [gemma, "eval", "-m", model, "--ids", place / "ids.json", "--json", "-q"]
                done = subprocess.run([*words, "--kv", "f32", *shown, *options],
                                      check=True, stdout=subprocess.PIPE)  # fmt: skip
                got = json.loads(done.stdout)["nll"]
                pairs = zip(text["nll"], text["ids"][1:])
                want = [nll for nll, token in pairs if token != SOFT]
                assert len(got) == len(want)
                differs = max(abs(a - b) for a, b in zip(got, want))
                worst = max(worst, differs)
                print(f"{family:15} {text['name']:22} {len(text['images'])} images "
                      f"{differs:.1e}")  # fmt: skip
    print(f"worst: {worst:.1e} nats")
    return worst > MOST


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
