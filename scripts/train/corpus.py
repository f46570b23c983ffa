"""Reading the shared corpus: zstd text shards whose documents end in a line `<|doc|>`.

A shard is named `{kind}-{open|sa}-NN.txt.zst` (train) or `{kind}-{open|sa}.txt.zst` (heldout),
with kind one of code, docs, instruct, prose.
"""
import glob
import os

KINDS = ("code", "docs", "instruct", "prose")


def shards(corpus, split, kind=None):
    """Paths of the shards of a split ('train' or 'heldout'), sorted by name."""
    paths = sorted(glob.glob(os.path.join(corpus, split, "*.txt*")))
    return [p for p in paths if kind is None or os.path.basename(p).startswith(kind + "-")]


def read_text(path):
    if path.endswith(".zst"):
        import zstandard

        with open(path, "rb") as f:
            data = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(f).read()
        return data.decode("utf-8")
    with open(path, encoding="utf-8", newline="") as f:
        return f.read()


def documents(path):
    """The documents of one shard, in file order, without their end marks."""
    docs = (d.removesuffix("\n") for d in (read_text(path) + "\n").split("<|doc|>\n"))
    return [d for d in docs if d.strip()]


def kind_of(path):
    return os.path.basename(path).split("-")[0]
