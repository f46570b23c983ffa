"""Tokenises shards of the corpus for gemma3-draft with Gemma 3's tokenizer.

    python draft_tokens.py --tokenizer tokenizer.json --out DATA [--limit N] SHARD.txt.zst ...

Writes per shard and stream DATA/{train|heldout}.STREAM.SHARD.npy: int32, the id in the low 20 bits,
ANSWER on what the model says in a chat. Every document starts with <bos>; all but chats end in
<eos>. Streams: code, docs, prose, chat (questions and answers that people wrote, dialogues,
exercises) and derived (chats made from documentation and code by templates). A file appears
complete or not at all, so that training may start on the first shards while others come."""
import argparse
import os
from multiprocessing import Pool

import numpy as np

from chats import classify
from corpus import kind_of

ANSWER = 1 << 20
BOS, EOS, SOT, EOT = 2, 1, 105, 106
STREAMS = ("code", "docs", "prose", "chat", "derived")
TOK = None


def start(path):
    global TOK
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    TOK = Tokenizer.from_file(path)


def read(path):
    try:
        import pyarrow

        return pyarrow.input_stream(path, compression="zstd").read().decode("utf-8")
    except ImportError:
        from corpus import read_text

        return read_text(path)


def encode(text):
    return np.array(TOK.encode(text, add_special_tokens=False).ids, np.int32)


def mark_answers(ids):
    model, opens, ends = TOK.token_to_id("model"), np.flatnonzero(
        ids == SOT
    ), np.flatnonzero(ids == EOT)
    for o in opens:
        if o + 2 < len(ids) and ids[o + 1] == model:
            after = ends[ends > o]
            ids[o + 3 : (after[0] if len(after) else len(ids)) + 1] |= ANSWER
    return ids


def work(job):
    kind, docs = job
    out = {}
    for d in docs:
        if kind == "instruct":
            stream = "derived" if classify(d) in ("tpl", "api", "codeqa") else "chat"
            ids = mark_answers(encode("<bos>" + d.strip() + "\n"))
        else:
            stream, ids = kind, np.concatenate([[BOS], encode(d + "\n"), [EOS]]).astype(np.int32)
        out.setdefault(stream, []).append(ids)
    return {s: np.concatenate(parts) for s, parts in out.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument(
        "--limit", type=int, default=0, help="about so many documents per shard (smoke test)"
    )
    ap.add_argument("--procs", type=int, default=os.cpu_count())
    ap.add_argument("shards", nargs="+")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    with Pool(a.procs, start, (a.tokenizer,)) as pool:
        for path in a.shards:
            docs = [d.removesuffix("\n") for d in (read(path) + "\n").split("<|doc|>\n")]
            docs = [d for d in docs if d.strip()]
            docs = docs[:: max(1, len(docs) // a.limit)] if a.limit else docs
            jobs, batch, size = [], [], 0
            for d in docs:
                batch.append(d)
                size += len(d)
                if size > 150_000:
                    jobs.append((kind_of(path), batch))
                    batch, size = [], 0
            if batch:
                jobs.append((kind_of(path), batch))
            streams = {}
            for found in pool.imap(work, jobs):
                for s, ids in found.items():
                    streams.setdefault(s, []).append(ids)
            split = "heldout" if "heldout" in os.path.dirname(os.path.abspath(path)) else "train"
            for s, parts in streams.items():
                ids = np.concatenate(parts)
                name = os.path.join(
                    a.out, f"{split}.{s}.{os.path.basename(path).split('.')[0]}.npy"
                )
                np.save(name + ".tmp.npy", ids)
                os.replace(name + ".tmp.npy", name)
                print(f"{os.path.basename(name)}: {len(ids)} tokens", flush=True)


if __name__ == "__main__":
    main()
