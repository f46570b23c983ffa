"""Packs checkpoints for a narrow way home: byte planes apart, xz, in files of at most 15 MiB; and unpacks them again.

    python draft_fetch.py pack OUT FILE.pt ...        python draft_fetch.py unpack OUT FOLDER ...
"""
import io
import lzma
import os
import sys
from multiprocessing import Pool

CHUNK = 20 << 20


def squeeze(block):
    return lzma.compress(block, preset=1)


def pack(out, paths):
    os.makedirs(out, exist_ok=True)
    for path in paths:
        data = open(path, "rb").read()
        planes = data[::2] + data[1::2]
        with Pool() as pool:
            small = pool.map(squeeze, [planes[i : i + (4 << 20)] for i in range(0, len(planes), 4 << 20)])
        files, size = [], 0
        for block in small:
            if not files or size + len(block) > 15 << 20:
                files.append(io.BytesIO())
                size = 0
            files[-1].write(block)
            size += len(block)
        for i, f in enumerate(files):
            with open(os.path.join(out, f"{os.path.basename(path)}.{i:02}.xz"), "wb") as to:
                to.write(f.getvalue())


def read(path):
    return lzma.decompress(open(path, "rb").read())


def unpack(out, folders):
    parts = {}
    for folder in folders:
        for name in os.listdir(folder):
            if name.endswith(".xz"):
                parts[name] = os.path.join(folder, name)
    for base in sorted({n[:-6] for n in parts}):
        with Pool() as pool:
            names = [n for n in sorted(parts) if n[:-6] == base]
            planes = b"".join(pool.map(read, [parts[n] for n in names], chunksize=1))
        half = (len(planes) + 1) // 2
        data = bytearray(len(planes))
        data[::2], data[1::2] = planes[:half], planes[half:]
        with open(os.path.join(out, base), "wb") as f:
            f.write(data)


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](sys.argv[2], sys.argv[3:])
