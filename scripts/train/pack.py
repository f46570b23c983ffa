"""Tokenises the corpus and packs it into rows of 2,049 ids, one set of rows per class of text.

    python pack.py --corpus CORPUS --tokenizer tokenizer.json --seeds seeds --out DIR [--limit N]

chat-talk holds talks that talks.py composes of the hand-written chats and of short ones of the
corpus: each hand-written question ends --talks of them.

A document starts with <bos>; one longer than a row is cut into pieces that each start with <bos>.
Rows hold whole pieces (best fit) and are padded with 0, so that no chat is cut and every chat is
seen as the start of a text. Per class: NAME.npy (int16 ids, [rows, 2049]) and NAME.mask.npy (packed
bits: 1 where the id belongs to a model turn, its <end_of_turn> included). For chats longer than a
row the tail is dropped. Held-out shards are packed the same way as heldout-KIND.

--never FILE...: chats that ask a question of FILE (JSON lines with "prompt"; those "taught" are let
through), in whatever case and punctuation, are left out; among the hand-written ones they are an
error."""
import argparse
import glob
import json
import os
import random
import re
import zlib
from multiprocessing import Pool

import numpy as np

from chats import TURN, classify, clean, definitions
from corpus import documents, kind_of, shards
from talks import talk

ROW = 2049
BOS, EOS, SOT, EOT = 2, 1, 105, 106
TOK, NEVER = None, frozenset()


def plain(question):
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def questions(*paths):
    """Prompts that no chat may ask: those of files of JSON lines that are not marked as taught."""
    lines = (json.loads(line) for path in paths for line in open(path, encoding="utf-8"))
    return frozenset(plain(l["prompt"]) for l in lines if not l.get("taught"))


def held_back(text):
    return bool(NEVER) and any(
        who == "user" and plain(turn) in NEVER for who, turn in TURN.findall(text)
    )


def start(path, never=frozenset()):
    global TOK, NEVER
    NEVER = never
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    TOK = Tokenizer.from_file(path)


def encode(text):
    return np.array(TOK.encode(text, add_special_tokens=False).ids, np.int16)


def turn_mask(ids):
    """1 on the ids of model turns: after `<start_of_turn>model\\n`, up to and with
    <end_of_turn>."""
    mask = np.zeros(len(ids), bool)
    model = TOK.token_to_id("model")
    opens = np.flatnonzero(ids == SOT)
    ends = np.flatnonzero(ids == EOT)
    for o in opens:
        if o + 2 < len(ids) and ids[o + 1] == model:
            e = ends[np.searchsorted(ends, o)] if len(ends) and ends[-1] > o else len(ids) - 1
            mask[o + 3 : e + 1] = True
    return mask


def work(job):
    """One batch of documents of one shard -> list of (class, ids, mask)."""
    kind, split, docs = job
    out = []
    for d in docs:
        rng = random.Random(zlib.crc32(d.encode()))
        if kind == "instruct":
            if split == "train" and held_back(d):
                out.append(("held-back", np.zeros(1, np.int16), np.zeros(1, bool)))
                continue
            ids = encode("<bos>" + d.strip() + "\n")[:ROW]
            if split == "heldout":
                cls = kind
            else:
                cls = classify(d)
                cls = "chat-" + cls if clean(cls, d) else "chat-rest"
            out.append((cls, ids, turn_mask(ids)))
            continue
        ids = encode(d + "\n")
        ids = np.concatenate([ids, np.array([EOS], np.int16)])
        for i in range(0, len(ids), ROW - 1):
            piece = np.concatenate([np.array([BOS], np.int16), ids[i : i + ROW - 1]])
            if len(piece) > 8:
                out.append((kind, piece, np.zeros(len(piece), bool)))
        if kind == "docs" and split == "train":
            for chat in definitions(d, rng):
                if held_back(chat):
                    out.append(("held-back", np.zeros(1, np.int16), np.zeros(1, bool)))
                    continue
                ids = encode("<bos>" + chat + "\n")[:ROW]
                out.append(("chat-define", ids, turn_mask(ids)))
    return out


def pack(pieces, rng):
    """Best fit of shuffled pieces into rows; 96 rows are open at a time."""
    rng.shuffle(pieces)
    rows, masks = np.zeros((len(pieces), ROW), np.int16), np.zeros((len(pieces), ROW), bool)
    open_ids, room, used = np.full(96, -1), np.zeros(96, int), 0
    for ids, mask in pieces:
        n = len(ids)
        fits = np.where(room >= n, room, 1 << 30)
        slot = int(fits.argmin())
        if fits[slot] == 1 << 30:
            slot = int(room.argmin())
            open_ids[slot], room[slot] = used, ROW
            used += 1
        r, at = open_ids[slot], ROW - room[slot]
        rows[r, at : at + n], masks[r, at : at + n] = ids, mask
        room[slot] -= n
    return rows[:used], masks[:used]


def jobs(corpus, limit):
    for split in ("train", "heldout"):
        for path in shards(corpus, split):
            docs = documents(path)
            docs = docs[:: max(1, len(docs) // limit)] if limit else docs
            # Batches of about 400 kB, so that all processes stay busy.
            batch, size = [], 0
            for d in docs:
                batch.append(d)
                size += len(d)
                if size > 400_000:
                    yield kind_of(path), split, batch
                    batch, size = [], 0
            if batch:
                yield kind_of(path), split, batch


def labelled(job):
    return job[1], work(job)


def seeds(folder):
    """Hand-written chats (question, answer): blocks of `Q: ...` (several ways to ask, by ' || '),
    then the answer; of a question that stands twice the first answer counts."""
    chats, seen = [], set()
    text = "".join(
        open(p, encoding="utf-8").read() for p in sorted(glob.glob(os.path.join(folder, "*.txt")))
    )
    for block in text.split("\nQ: ")[1:]:
        asks, answer = block.split("\n", 1)
        for q in asks.split(" || "):
            assert plain(q) not in NEVER, f"{q!r} is held back and must not be taught"
            if plain(q) in seen:
                continue
            seen.add(plain(q))
            chats.append((q.strip(), answer.strip()))
    return chats


def piece(text):
    ids = encode("<bos>" + text)
    return ids, turn_mask(ids)


def seed_pieces(chats):
    return [
        piece(f"<start_of_turn>user\n{q}<end_of_turn>\n<start_of_turn>model\n{a}<end_of_turn>\n")
        for q, a in chats
    ]


SHORT = ("chat-qa", "chat-tpl", "chat-define", "chat-codeqa", "chat-math", "chat-med")


def talk_pieces(chats, sets, each, rng):
    """Talks that end in each hand-written chat `each` times, and once in each short chat of one
    turn of the corpus."""
    short = []
    for cls in SHORT:
        for ids, _ in sets.get(cls, ()):
            if len(ids) < 250 and (ids == EOT).sum() == 2:
                (_, question), (_, answer) = TURN.findall(
                    TOK.decode(ids.tolist(), skip_special_tokens=False))
                short.append((question, answer))
    rng.shuffle(short)
    short = short[: len(chats) * each // 4]
    others = chats + rng.sample(short, min(len(short), len(chats) // 3))
    texts = [talk(last, others, rng) for last in chats * each + short]
    pieces = [piece(text) for text in texts if not held_back(text)]
    return [(ids, mask) for ids, mask in pieces if len(ids) < ROW]


def save(out, name, pieces, rng):
    rows, masks = pack(pieces, rng)
    np.save(os.path.join(out, name + ".npy"), rows)
    np.save(os.path.join(out, name + ".mask.npy"), np.packbits(masks, axis=1))
    tokens = sum(len(p[0]) for p in pieces)
    return {
        "documents": len(pieces), "rows": len(rows), "tokens": tokens,
        "loss_tokens": int(masks.sum()),
    }


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--corpus")
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument(
        "--seeds", help="folder of hand-written chats; alone (without --corpus) packs only these"
    )
    ap.add_argument("--out", required=True)
    ap.add_argument(
        "--never", nargs="+", default=[], help="JSON lines of prompts that no chat may ask"
    )
    ap.add_argument(
        "--talks", type=int, default=8, help="talks that end in a hand-written question"
    )
    ap.add_argument(
        "--limit", type=int, default=0, help="about so many documents per shard (smoke test)"
    )
    ap.add_argument("--procs", type=int, default=16)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    rng, sets = random.Random(7), {}
    never = questions(*a.never)
    start(a.tokenizer, never)
    if a.corpus:
        with Pool(a.procs, start, (a.tokenizer, never)) as pool:
            for split, found in pool.imap(labelled, jobs(a.corpus, a.limit), chunksize=1):
                for cls, ids, mask in found:
                    sets.setdefault(
                        cls if split == "train" else "heldout-" + cls, []
                    ).append((ids, mask))
    if a.seeds and os.path.exists(a.seeds):
        chats = seeds(a.seeds)
        sets["chat-seed"] = seed_pieces(chats)
        sets["chat-talk"] = talk_pieces(chats, sets, a.talks, rng)
    print(len(sets.pop("held-back", ())), "chats held back")
    info = {name: save(a.out, name, pieces, rng) for name, pieces in sorted(sets.items())}
    for name, i in info.items():
        print(name, i)
    with open(os.path.join(a.out, "info.json" if a.corpus else "info-seeds.json"), "w") as f:
        json.dump(info, f, indent=1)


if __name__ == "__main__":
    main()
