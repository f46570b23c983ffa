"""Collects what the target is to answer while the draft is trained: chats of the corpus, tasks made
of its text, text to go on with.

    python prompts.py --corpus CORPUS --tokenizer tokenizer.json --seeds seeds \\
        --never FILE ... --out prompts.npz

Writes `ids` (int16, one prompt after the other, each from <bos> on), `lengths` and `kinds` (an
index into KINDS). A prompt of a chat ends where the model's turn begins. --never: JSON lines with
"prompt" or "turns"; a prompt that asks one of those, or shares 13 words in a row with one, is left
out, except for lines marked "taught".
"""

import argparse
import collections
import glob
import json
import os
import random
import re
from multiprocessing import Pool

import numpy as np

import pack
from chats import TURN, classify, definitions
from corpus import documents, shards

KINDS = ("chat", "turn", "task", "sum", "code", "text")
SUMMARISE = (
    "Summarize: {}",
    "Summarise this text in a few sentences.\n\n{}",
    "{}\n\nWhat are the main points?",
    "Give a short summary:\n{}",
    "What is this passage about?\n\n{}",
    "TL;DR of the following, please: {}",
)
REWORK = (
    "Rewrite this in simpler words:\n\n{}",
    "{}\n\nList the names that occur in this text.",
    "Extract the key facts as a list.\n\n{}",
    "{}\n\nIs this text positive or negative? Say why.",
    "Continue this text: {}",
    "Turn this into bullet points:\n{}",
    "Which questions does this text answer?\n\n{}",
    "Correct the grammar of this text: {}",
    "{}\n\nGive this text a title.",
)
ABOUT = (
    "{}\n\nUsing the text above, tell me: what is said about {}?",
    "Here is some context.\n{}\n\nQuestion: what do you know about {}?",
    "Read this and answer.\n\n{}\n\nWhy does {} matter here?",
    "Based on this passage, who or what is {2}?\n\n{0}",
)
WRITE = (
    "Write a {} about {}.",
    "Please write me a {} on the subject of {}.",
    "Compose a {} that explains {} to {who}.",
    "I need a {} about {} for {who}. Can you help?",
    "Draft a {} on {} and end it with a question.",
    "Write a {} of three paragraphs about {}.",
)
FORM = (
    "short story",
    "poem",
    "blog post",
    "letter",
    "speech",
    "news article",
    "dialogue",
    "product review",
    "joke",
    "song",
    "essay",
    "travel report",
    "job advertisement",
    "recipe",
    "persuasive email",
    "lesson plan",
    "press release",
    "diary entry",
    "outline",
    "fairy tale",
)
WHO = (
    "a child",
    "a beginner",
    "my manager",
    "students",
    "an expert",
    "a friend",
    "customers",
    "my grandmother",
    "engineers",
    "tourists",
)
ROLE = (
    "a pirate",
    "a doctor",
    "a teacher of physics",
    "an old sailor",
    "a detective",
    "a famous chef",
    "a robot",
    "a lawyer",
    "a king",
    "a gardener",
    "an astronaut",
    "a software engineer",
    "a poet",
    "a historian",
    "a football coach",
    "a librarian",
    "a travel guide",
)
PLAY = (
    "You are {0}. Tell me what you think about {1}.",
    "Act as {0} and explain {1}.",
    "Imagine that you are {0}. A child asks you about {1}. What do you say?",
    "Speak like {0}: why should anybody care about {1}?",
    "Play the role of {0} in an interview about {1}.",
)
ASK = (
    "What is {}?",
    "What are {} used for?",
    "Who discovered {}?",
    "When did {} begin?",
    "Where does {} come from?",
    "How does {} work?",
    "Why is {} important?",
    "Who is responsible for {}?",
    "What is the origin of {}?",
    "How many kinds of {} are there?",
    "where can you find {}",
    "who invented {}",
    "what does {} mean",
    "when was {} first described",
    "how long does {} last",
    "What is the difference between {} and {}?",
    "How is {} related to {}?",
    "Compare {} with {}.",
    "Name three advantages of {}.",
    "Describe {} and give an example.",
    "Which is more important, {} or {}? Explain your reasoning.",
    "What would happen without {}?",
    "Give me five ideas for {}.",
    "Explain step by step how {} leads to {}.",
    "Discuss the effects of {} on {}.",
    "If all {0} are {1}, does it follow that all {1} are {0}?",
    "Argue for and against {}.",
    "What are common mistakes with {}?",
)
PROGRAM = (
    "Write a {} function that {}.",
    "Write a {} program that {}.",
    "How do I write {} code that {}?",
    "Implement in {}: a function that {}.",
    "Show me {} code which {}, with comments.",
)
FINISH = (
    "Finish this {0} function.\n\n```{1}\n{2}\n```",
    "Fill in the body:\n\n```{1}\n{2}\n```",
    "Complete this code.\n\n```{1}\n{2}\n```",
    "What does this {0} code do?\n\n```{1}\n{2}\n```",
    "Find the bug in this code:\n\n```\n{2}\n```",
    "{2}",
)
LANGUAGES = {
    ".py": "python",
    ".rs": "rust",
    ".js": "javascript",
    ".ts": "typescript",
    ".go": "go",
    ".java": "java",
    ".c": "c",
    ".cpp": "cpp",
    ".h": "c",
    ".rb": "ruby",
    ".cs": "csharp",
    ".kt": "kotlin",
    ".swift": "swift",
    ".sh": "bash",
}
# Sentences in German, put together from parts.
GERMAN = (
    (
        "Der Minister",
        "Die Regierung",
        "Ein Sprecher der Polizei",
        "Das Unternehmen",
        "Die Forscher",
        "Mein Nachbar",
        "Der Verein",
        "Die Stadt",
        "Eine junge Frau",
        "Der Präsident",
        "Die Mannschaft",
        "Viele Menschen",
    ),
    (
        "kündigte am Montag an",
        "sagte der Zeitung",
        "bestätigte gestern",
        "hofft",
        "glaubt nicht",
        "erklärte im Parlament",
        "teilte mit",
        "fürchtet",
    ),
    (
        "dass die Preise weiter steigen",
        "dass der Zug wieder pünktlich fährt",
        "dass neue Arbeitsplätze entstehen",
        "dass es morgen regnet",
        "dass das Spiel verloren geht",
        "dass die Brücke im Sommer fertig wird",
        "dass niemand verletzt wurde",
        "dass die Schule geschlossen bleibt",
    ),
    (
        "",
        ", obwohl das Geld fehlt",
        " , weil die Nachfrage groß ist",
        " und die Bürger zufrieden sind",
        ", wie es in Berlin heißt",
    ),
)
TRANSLATE = (
    "Translate German to English: {}",
    "Translate into English: {}",
    "What does this mean in English? {}",
)


def shingles(text, n=13):
    words = pack.plain(text).split()
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}


def forbidden(paths):
    """Questions, and runs of 13 words, that no prompt may have."""
    asked, runs = set(), set()
    for path in paths:
        for line in map(json.loads, open(path, encoding="utf-8")):
            if not line.get("taught"):
                for turn in [line["prompt"]] if "prompt" in line else line["turns"]:
                    asked.add(pack.plain(turn))
                    runs |= shingles(turn)
    return asked, runs


def chat(question, rest=""):
    return (
        f"<bos><start_of_turn>user\n{question.strip()}<end_of_turn>\n<start_of_turn>model\n{rest}"
    )


def from_chats(docs, rng):
    """First turns (of pages of programming interfaces a third), later turns, topics, and
    calculations with other numbers."""
    for d in docs:
        turns = TURN.findall(d)
        if len(turns) < 2 or turns[0][0] != "user":
            continue
        kind, question = classify(d), turns[0][1]
        if kind != "api" or rng.random() < 0.33:
            yield "chat", chat(question), question
        if kind == "math":
            for _ in range(6):
                other = re.sub(
                    r"\d+", lambda m: str(rng.randint(2, max(9, 3 * int(m[0][:6])))), question
                )
                yield "sum", chat(other), other
        if len(turns) > 3:
            last = rng.randrange(2, len(turns) - 1, 2)
            text = "".join(
                f"<start_of_turn>{who}\n{t}<end_of_turn>\n" for who, t in turns[: last + 1]
            )
            yield (
                "turn",
                "<bos>" + text + "<start_of_turn>model\n",
                " ".join(t for _, t in turns[: last + 1]),
            )


def topics_of(chats, docs):
    """Terms that the corpus asks about and defines, and the names that its documents say three
    times or more."""
    asked = re.compile(
        r"<start_of_turn>user\n(?:What (?:is|are)|Tell me about|Can you explain|Explain|Describe) "
        r"(?:an? |the )?([^?.`(]{3,32})[?.]"
    )
    found = {
        m[1].strip()
        for m in map(asked.match, chats)
        if m and " in Windows" not in m[1] and " in simple" not in m[1]
    }
    names = collections.Counter(
        n
        for d in docs
        for n in re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})+", d[:20_000])
    )
    return sorted(found | {n for n, count in names.items() if count > 2})


def pieces(text, rng, count, least, most):
    """Runs of whole lines of a text, from random places."""
    lines = [i for i, c in enumerate(text) if c == "\n"] or [0]
    for _ in range(count):
        at = rng.choice(lines)
        piece = text[at : at + rng.randint(least, most)].strip()
        if len(piece) >= least // 2:
            yield piece


def from_text(docs, rng, topics, share):
    """Text to go on with, and tasks about passages; `share`: how many of each a document gives
    on average for 10 kB."""
    for d in docs:
        count = int(len(d) / 10_000 * share + rng.random())
        for piece in pieces(d, rng, count, 80, 500):
            yield "text", "<bos>" + piece, piece
        for piece in pieces(d, rng, int(count * 0.5 + rng.random()), 200, 1100):
            form = rng.choice(SUMMARISE + REWORK + ABOUT)
            words = re.findall(r"[A-Z][a-z]{3,}(?: [A-Z][a-z]+)*", piece)
            task = form.format(piece, rng.choice(words or topics), rng.choice(words or topics))
            yield "task", chat(task), task


def from_code(docs, rng, share):
    for d in docs:
        language = LANGUAGES.get(os.path.splitext(d.split("\n", 1)[0].strip())[1])
        count = int(len(d) / 10_000 * share + rng.random())
        for piece in pieces(d, rng, count, 60, 400):
            yield "text", "<bos>" + piece, piece
        heads = [
            m
            for m in re.finditer(
                r"^[ \t]*(?:pub |async |static |public |export |private )*"
                r"(?:def|fn|func|function|class|int|void|struct) \w+.*$",
                d,
                re.M,
            )
        ]
        for m in rng.sample(heads, min(len(heads), 2 * count)) if language else ():
            before = d[: m.start()].split("\n")[-rng.randint(1, 6) :]
            piece = (
                "\n".join(before).lstrip("\n")
                + d[m.start() : m.end() + rng.choice((0, 1, 60, 150))]
            )
            task = rng.choice(FINISH).format(language, language, piece.strip("\n"))
            yield "code", chat(task), task


def made_up(topics, deeds, rng, count):
    """Tasks put together from topics and forms."""
    for _ in range(count):
        t, u, who = rng.choice(topics), rng.choice(topics), rng.choice(WHO)
        what = rng.random()
        if what < 0.42:
            task = rng.choice(ASK).format(t, u)
        elif what < 0.62:
            task = rng.choice(WRITE).format(rng.choice(FORM), t, who=who)
        elif what < 0.74:
            task = rng.choice(PLAY).format(rng.choice(ROLE), t)
        elif what < 0.92 and deeds:
            task = rng.choice(PROGRAM).format(
                rng.choice(sorted(set(LANGUAGES.values()))), rng.choice(deeds)
            )
        else:
            task = rng.choice(TRANSLATE).format(
                " ".join(
                    f"{a} {b}, {c}{d}."
                    for a, b, c, d in [[rng.choice(p) for p in GERMAN]] * rng.choice((1, 1, 2))
                )
            )
        yield "task", chat(task), task


def encode(job):
    """Ids of those texts that are allowed and short enough."""
    texts, asked, runs, most = job
    out = []
    for kind, text, said in texts:
        if pack.plain(said) in asked or not runs.isdisjoint(shingles(said)):
            out.append(None)
            continue
        ids = pack.encode(text)
        if 4 <= len(ids) <= most:
            out.append((KINDS.index(kind), ids))
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--seeds")
    ap.add_argument("--never", nargs="*", default=[])
    ap.add_argument("--out", required=True)
    ap.add_argument(
        "--longest", type=int, default=352, help="ids of a prompt; longer ones are left out"
    )
    ap.add_argument("--tasks", type=int, default=150_000, help="tasks put together from topics")
    ap.add_argument("--share", type=float, default=4, help="pieces of text for each 10 kB")
    ap.add_argument("--limit", type=int, default=0, help="only so many documents of each shard")
    ap.add_argument("--procs", type=int, default=16)
    a = ap.parse_args()
    rng = random.Random(11)
    read = lambda *kinds: [
        documents(p)[: a.limit or None] for k in kinds for p in shards(a.corpus, "train", k)
    ]
    chats = [d for docs in read("instruct") for d in docs]
    plain = read("docs", "prose")
    defined = [d for docs in plain for text in docs for d in definitions(text, rng)]
    chats += defined
    topics = topics_of(
        [d for d in chats if classify(d) not in ("med", "api")], [d for docs in plain for d in docs]
    )
    deeds = sorted(
        {
            m[1]
            for d in chats
            for m in [
                re.match(
                    r"<start_of_turn>user\nWrite (?:the|a|an) \S+ (?:function|method) "
                    r"[^<]{0,40}?(?:to|that|which) ([^.<`]{12,90})\.",
                    d,
                )
            ]
            if m
        }
    )
    texts = list(from_chats(chats, rng)) + list(made_up(topics, deeds, rng, a.tasks))
    for path in sorted(glob.glob(os.path.join(a.seeds, "*.txt"))) if a.seeds else ():
        for block in open(path, encoding="utf-8").read().split("\nQ: ")[1:]:
            texts += [("chat", chat(q), q) for q in block.split("\n", 1)[0].split(" || ")]
    for docs in plain:
        texts += from_text(docs, rng, topics, a.share)
    for docs in read("code"):
        texts += from_code(docs, rng, a.share)
    print(f"{len(topics)} topics, {len(deeds)} programs, {len(texts)} texts", flush=True)
    rng.shuffle(texts)
    asked, runs = forbidden(a.never)
    pack.start(a.tokenizer)
    with Pool(a.procs, pack.start, (a.tokenizer,)) as pool:
        jobs = ((texts[i : i + 2000], asked, runs, a.longest) for i in range(0, len(texts), 2000))
        found = [p for part in pool.imap(encode, jobs) for p in part]
    kept = [p for p in found if p]
    kinds = np.array([k for k, _ in kept], np.uint8)
    lengths = np.array([len(i) for _, i in kept], np.int16)
    np.savez(a.out, ids=np.concatenate([i for _, i in kept]), lengths=lengths, kinds=kinds)
    print(
        f"{len(found) - len(kept)} held back, {len(kept)} prompts, "
        f"{lengths.sum(dtype=int) / 1e6:.1f} M ids"
    )
    for i, name in enumerate(KINDS):
        n = lengths[kinds == i]
        print(f"{name}: {len(n)} prompts, {n.mean() if len(n) else 0:.0f} ids on average")


if __name__ == "__main__":
    main()
